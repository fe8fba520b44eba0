"""A tokenizer's template around cut texts gives the tokens and types of tokenizers' own truncation, `longest_first`."""

from array import array
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from fairlead_common.prompts.text_template import TextTemplate

WORDS = {text: number for number, text in enumerate(("[CLS]", "[SEP]", "a", *(f"w{number}" for number in range(40))))}
PROCESSORS: dict[str, Any] = {
    "none": None,
    "bert": processors.BertProcessing(("[SEP]", 1), ("[CLS]", 0)),
    "roberta": processors.RobertaProcessing(("[SEP]", 1), ("[CLS]", 0)),
    "template": processors.TemplateProcessing(
        single="$A [SEP] [CLS]", pair="$A [SEP] [CLS] $B:1 [SEP]:1", special_tokens=[("[CLS]", 0), ("[SEP]", 1)]
    ),
}


@pytest.mark.parametrize("keeps_end", [False, True])
@pytest.mark.parametrize("name", PROCESSORS)
def test_cut_texts_equal_tokenizers_own(name: str, keeps_end: bool) -> None:
    tokenizer = Tokenizer(models.WordLevel(WORDS, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if PROCESSORS[name] is not None:
        tokenizer.post_processor = PROCESSORS[name]
    for lengths in ((5,), (40,), (3, 4), (3, 30), (30, 3), (20, 21), (21, 20), (1, 9)):
        texts = [" ".join(f"w{(number * 7) % 40}" for number in range(length)) for length in lengths]
        bare = [array("I", tokenizer.encode(text, add_special_tokens=False).ids) for text in texts]
        for limit in (None, 6, 13, 14, 100):
            tokenizer.no_truncation()
            template = TextTemplate.probe(tokenizer, len(texts))
            if limit is not None:
                tokenizer.enable_truncation(limit, direction="left" if keeps_end else "right")
            want = tokenizer.encode(*texts)
            tokens, second = template.join(bare, limit, keeps_end)
            assert tokens.tolist() == want.ids, (lengths, limit)
            if len(texts) > 1:
                assert [int(0 < second <= place) for place in range(len(tokens))] == want.type_ids
