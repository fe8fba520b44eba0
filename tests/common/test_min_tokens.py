"""The lower bound of a text's token count never exceeds the real count, for any tokenizer, and recognises long texts."""

import json
from functools import cache

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.common.test_encoder import CHATML
from tests.common.tokenizers_made_here import KINDS, SPECIAL, format_of
from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers

from fairlead_common.prompts import encoder as encoder_module
from fairlead_common.prompts.encoder import PromptEncoder, PromptTooLong
from fairlead_common.prompts.min_tokens import MinTokenCounter

ODD = [
    "<mask>",
    "[c]",
    "##",
    "a\u0301",
    "o\u0302\u0301",
    "\u0301\u0302",
    "é",
    "ﬁ",
    "Ⅷ",
    "\u212a",
    "İ",
    " ",
    " " * 40,
    "\n",
    "----",
    "漢字",
    "🙂",
    "\x07",
]
texts = st.lists(
    st.sampled_from([*SPECIAL, *ODD]) | st.text(st.characters(codec="utf-8"), max_size=8) | st.from_regex(r"[a-zA-Z0-9]{1,40}")
)


@cache
def encoder(kind: str, normalizer: str = "", splitter: str = "") -> PromptEncoder:
    """`normalizer`, `splitter`: names in `STEPS` of one more step after the tokenizer's own."""
    format = format_of(kind, CHATML)
    backend = Tokenizer.from_str(format.tokenizer_json)
    if normalizer:
        backend.normalizer = normalizers.Sequence([*([backend.normalizer] if backend.normalizer else []), STEPS[normalizer]])
    if splitter:
        backend.pre_tokenizer = pre_tokenizers.Sequence([SPLITTERS[splitter], backend.pre_tokenizer])
    return PromptEncoder(msgspec.structs.replace(format, tokenizer_json=backend.to_str()))


STEPS = {
    "nfc": normalizers.NFC(),
    "nfkc": normalizers.NFKC(),
    "no accents": normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()]),
    "bert": normalizers.BertNormalizer(),
    "nmt": normalizers.Nmt(),
    "strip": normalizers.Strip(),
    "blanks": normalizers.Replace(" ", ""),
    "letters": normalizers.Replace("a", ""),
    "pattern": normalizers.Replace(Regex("[b-y]+"), ""),
}
SPLITTERS = {
    "words": pre_tokenizers.Whitespace(),
    "punctuation": pre_tokenizers.Punctuation("removed"),
    "removed": pre_tokenizers.Split(Regex(r"\w+"), "removed"),
    "at a": pre_tokenizers.CharDelimiterSplit("a"),
    "at a rule": pre_tokenizers.CharDelimiterSplit("-"),
}
TOKENIZERS = [(kind, "", "") for kind in KINDS] + [("llama3", step, "") for step in STEPS] + [("llama3", "", split) for split in SPLITTERS]


@pytest.mark.parametrize(("kind", "normalizer", "splitter"), TOKENIZERS, ids=[" ".join(filter(None, one)) for one in TOKENIZERS])
@settings(deadline=None, max_examples=25)
@given(parts=texts)
@example(parts=["a\u0301" * 300])
@example(parts=["a" * 300])
@example(parts=["hello there " * 30])
@example(parts=["<mask>", " " * 300, "[c]", " " * 300])
def test_the_bound_never_exceeds_the_real_count(kind: str, normalizer: str, splitter: str, parts: list[str]) -> None:
    made, text = encoder(kind, normalizer, splitter), "".join(parts)
    assert made._min_tokens.count(text) <= len(made.encode_text(text, add_special_tokens=False))


def has_bound(kind: str, normalizer: str = "", splitter: str = "") -> bool:
    return encoder(kind, normalizer, splitter)._min_tokens.count("word " * 1000) > 0


def test_which_tokenizers_have_a_bound() -> None:
    assert [kind for kind in KINDS if not has_bound(kind)] == ["unigram", "wordpiece"], "a pattern that is replaced; words given up whole"
    assert [step for step in STEPS if not has_bound("llama3", step)] == ["letters", "pattern"]
    assert [split for split in SPLITTERS if not has_bound("llama3", "", split)] == ["removed", "at a"]
    parts = json.loads(format_of("llama2").tokenizer_json)
    del parts["model"]["vocab"]["7"]
    parts["model"]["merges"] = [pair for pair in parts["model"]["merges"] if "7" not in "".join(pair)]
    text = json.dumps(parts)
    assert MinTokenCounter(text, Tokenizer.from_str(text)).max_characters == 0, "a digit without a token in the vocabulary"


def test_a_text_that_is_certainly_too_long_is_not_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    """A text that only may be too long is tokenized."""
    made = encoder("qwen")
    long = "some words " * 5000
    tokens = len(made.encode_text(long))
    assert len(made.encode_text(long, max_tokens=tokens)) == tokens
    monkeypatch.setattr(made, "_tokenizer", None)
    with pytest.raises(PromptTooLong) as refused:
        made.encode_text(long, max_tokens=100)
    assert refused.value.field == "prompt" and 100 == refused.value.max_tokens < refused.value.min_tokens <= tokens
    with pytest.raises(PromptTooLong) as refused:
        made.encode_chat([{"role": "user", "content": long}], max_tokens=100)
    assert refused.value.field == "messages"


@pytest.mark.parametrize(("kind", "normalizer", "splitter"), TOKENIZERS, ids=[" ".join(filter(None, one)) for one in TOKENIZERS])
@settings(deadline=None, max_examples=8)
@given(parts=texts)
@example(parts=["! ?"])
@example(parts=["-"])
@example(parts=["a"])
@example(parts=["a" * 150, " "])
@example(parts=[" "])
def test_a_text_that_fits_is_never_refused(kind: str, normalizer: str, splitter: str, parts: list[str]) -> None:
    """Also where cuts fall into long words, which some tokenizers give up whole."""
    made, text = encoder(kind, normalizer, splitter), "".join(parts) or "x"
    text *= 1 + 3 * 512 // len(text)
    tokens = made.encode_text(text, add_special_tokens=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encoder_module, "SPARSE", 0)
        patch.setattr(encoder_module, "PIECE", 512)
        assert made.encode_text(text, add_special_tokens=False, max_tokens=max(1, len(tokens))) == tokens


@pytest.mark.parametrize("text", ["! ?", "-=", "\n\t", "漢", "🙂", "é ", "- "])
@pytest.mark.parametrize("kind", KINDS)
def test_a_text_of_any_characters_is_refused_after_few_tokens(kind: str, text: str) -> None:
    made = encoder(kind)
    whole = len(made.encode_text(text * 4000, add_special_tokens=False))
    most = whole // 20
    if most < 100:
        return  # this tokenizer drops these characters or joins them
    computed = 0

    class Counting:
        def __getattr__(self, name: str) -> object:
            return getattr(tokenizer, name)

        def encode_batch_fast(self, given: list[str], **options: bool) -> object:
            nonlocal computed
            found = tokenizer.encode_batch_fast(given, **options)
            computed += sum(map(len, found))
            return found

    tokenizer = made._tokenizer
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(made, "_tokenizer", Counting())
        patch.setattr(encoder_module, "SPARSE", 0)
        patch.setattr(encoder_module, "PIECE", 256)
        with pytest.raises(PromptTooLong) as refused:
            made.encode_text(text * 4000, add_special_tokens=False, max_tokens=most)
    assert refused.value.min_tokens <= whole
    assert computed <= 2 * most + 256 + 4 * 256 < whole
