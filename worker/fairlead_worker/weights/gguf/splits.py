"""How byte-level vocabularies split a text before merging, by `tokenizer.ggml.pre`.

The file has only a name. The patterns are those of the models' own tokenizers, under llama.cpp's names for them.
"""

from dataclasses import dataclass

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_HAN = "[一-龥ࠀ-一가-퟿]+"


def _words(digits: str) -> str:
    return rf"{_ENDING}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_REST}"


def _cased(ending: str, digits: str) -> str:
    start = r"[^\r\n\p{L}\p{N}]?"
    words = rf"{start}{_UPPER}*{_LOWER}+{ending}|{start}{_UPPER}+{_LOWER}*{ending}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_REST}"


@dataclass(frozen=True, slots=True)
class Split:
    """Patterns that are applied one after the other. Each match becomes a piece, and so does each text between matches."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    """Whether a piece that is a token needs no merges."""
    adds_bos: bool = False
    """Whether BOS is added if the file does not say."""


_LLAMA3, _QWEN2 = Split((_words(r"\p{N}{1,3}"),), ignore_merges=True, adds_bos=True), Split((_words(r"\p{N}"),))
_DIGITS, _PLAIN = Split((r"\p{N}", _GPT2)), Split((_GPT2,))
_GPT4O = Split((_cased(f"{_ENDING}?", r"\p{N}{1,3}"),))
SPLITS = {
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "gigachat"), _PLAIN),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), _DIGITS),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"), _LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe"), Split(_LLAMA3.patterns)),
    **dict.fromkeys(("qwen2", "stablelm2", "deepseek-r1-qwen", "megrez", "kormo"), _QWEN2),
    **dict.fromkeys(("gpt-4o", "llama4"), _GPT4O),
    "tekken": Split((_cased("", r"\p{N}"),), ignore_merges=True, adds_bos=True),
    "falcon": Split((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")),
    "deepseek-llm": Split(
        (r"[\r\n]", r"\s?[\p{Lu}\p{Ll}\p{Lt}]+", "\\s?[!-/:-~！-／：-～‘-‟\u3000-。]+", r"\s+$", _HAN, r"\p{N}+"),
    ),
    "deepseek-coder": Split((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN, r"\p{N}")),
    "deepseek-v3": Split(
        (
            r"\p{N}{1,3}",
            "[一-龥\u3040-ゟ゠-ヿ]+",
            r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"""
            r"\s*[\r\n]+|\s+(?!\S)|\s+",
        ),
    ),
    "default": Split((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
}
"""Value of `tokenizer.ggml.pre` -> how it splits."""
