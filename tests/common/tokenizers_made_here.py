"""Small tokenizers of every kind that models use, trained quickly on this repository's own text."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from fairlead_common.prompts.encoder import PromptFormat, digest

SPECIAL = ["<s>", "</s>", "<unk>", "<pad>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
_SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SIZE = 900


def _corpus() -> list[str]:
    here = Path(__file__).parent
    return [path.read_text(encoding="utf-8") for path in sorted(here.glob("test_*.py"))] + ["Größe 漢字 🙂 é naïve ﬁn Ⅷ " * 20]


def _byte_level(backend: Tokenizer) -> Tokenizer:
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        _corpus(), trainers.BpeTrainer(vocab_size=_SIZE, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False)
    )
    return backend


def _bos(backend: Tokenizer) -> None:
    backend.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))]),
        ]
    )


def qwen() -> Tokenizer:
    """Return byte-level BPE over NFC with Qwen's split; `<think>` and others are added tokens that are not special."""
    backend = Tokenizer(models.BPE())
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(_SPLIT), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    _byte_level(backend)
    backend.add_tokens([AddedToken(text, normalized=False) for text in ("<think>", "</think>", "<tool_call>", "</tool_call>")])
    return backend


def llama3() -> Tokenizer:
    """Return byte-level BPE without a normalizer, with many unused reserved tokens and a BOS token before every text."""
    backend = Tokenizer(models.BPE(ignore_merges=True))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(_SPLIT), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    _byte_level(backend)
    backend.add_special_tokens([f"<|reserved_special_token_{number}|>" for number in range(100)])
    _bos(backend)
    return backend


def _sentencepiece(backend: Tokenizer) -> Tokenizer:
    pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=_SIZE, special_tokens=[*SPECIAL, *pieces], show_progress=False)
    backend.train_from_iterator(_corpus(), trainer)
    settings = json.loads(backend.to_str())
    settings["model"]["byte_fallback"] = True
    settings["added_tokens"] = [token for token in settings["added_tokens"] if token["content"] in SPECIAL]  # bytes are the model's own
    made = Tokenizer.from_str(json.dumps(settings))
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return made


def llama2() -> Tokenizer:
    """Return BPE with byte fallback over whole texts: a normalizer puts a space before each."""
    backend = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made = _sentencepiece(backend)
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", made.token_to_id("<s>"))])
    return made


def mistral() -> Tokenizer:
    """Return Metaspace with a space before the first piece only."""
    backend = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return _sentencepiece(backend)


def metaspace_always() -> Tokenizer:
    backend = Tokenizer(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    return _sentencepiece(backend)


def unigram() -> Tokenizer:
    """Return a tokenizer as T5's: spaces collapsed and stripped, an end token after every text."""
    backend = Tokenizer(models.Unigram())
    backend.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")])
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(prepend_scheme="first")])
    trainer = trainers.UnigramTrainer(vocab_size=_SIZE, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False)
    backend.train_from_iterator(_corpus(), trainer)
    backend.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", backend.token_to_id("</s>"))])
    return backend


def wordpiece() -> Tokenizer:
    """Return a tokenizer as BERT's: lower case, accents stripped, words split at punctuation, [CLS] and [SEP] around."""
    backend = Tokenizer(models.WordPiece(unk_token="<unk>"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = [*SPECIAL, "[CLS]", "[SEP]"]
    backend.train_from_iterator(_corpus(), trainers.WordPieceTrainer(vocab_size=_SIZE, special_tokens=special, show_progress=False))
    backend.post_processor = processors.BertProcessing(("[SEP]", backend.token_to_id("[SEP]")), ("[CLS]", backend.token_to_id("[CLS]")))
    return backend


def roberta() -> Tokenizer:
    """Return a tokenizer with a space before every piece, and a `<mask>` that takes the space on its left."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    _byte_level(backend)
    backend.add_special_tokens([AddedToken("<mask>", lstrip=True, normalized=False)])
    backend.post_processor = processors.RobertaProcessing(("</s>", backend.token_to_id("</s>")), ("<s>", backend.token_to_id("<s>")))
    return backend


def awkward() -> Tokenizer:
    """Return added tokens that overlap, take whitespace, must stand alone, are normalized, or are whitespace themselves."""
    backend = Tokenizer(models.BPE())
    backend.normalizer = normalizers.Lowercase()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    _byte_level(backend)
    backend.add_special_tokens(
        [
            AddedToken("<|a|><", normalized=False),
            AddedToken("<|b|>", normalized=False),
            AddedToken("<|b|>x", normalized=False, lstrip=True),
            AddedToken("[c]", normalized=False, rstrip=True),
            AddedToken("  ", normalized=False),
            AddedToken("word", normalized=False, single_word=True),
            AddedToken("#one", normalized=False, single_word=True),
            AddedToken("##", normalized=False),
            AddedToken("<|EOT|>", normalized=True),
            AddedToken("id|><|start", normalized=False),
        ]
    )
    return backend


KINDS: dict[str, Callable[[], Tokenizer]] = {
    made.__name__: made for made in (qwen, llama3, llama2, mistral, metaspace_always, unigram, wordpiece, roberta, awkward)
}


@cache
def format_of(kind: str, template: str = "", **fields: Any) -> PromptFormat:
    """Return a prompt format with the tokenizer of one kind."""
    text = KINDS[kind]().to_str()
    return PromptFormat(
        tokenizer_json=text,
        tokenizer_digest=digest(text),
        model_digest="m",
        model_names=["m"],
        block_tokens=16,
        max_model_len=1 << 20,
        chat_template=template,
        special_tokens={"bos_token": "<s>", "eos_token": "</s>"},
        **fields,
    )
