"""The tokenizer of a GGUF file as tokenizer.json.

Tokens, scores and merges are in the file. How a text is split before merging is not: `splits` knows it by its name. Where llama.cpp and
transformers' reader of GGUF differ, this follows llama.cpp, whose rules the file was written for: digits are split as `smollm` says
(transformers keeps GPT-2's), and a SentencePiece vocabulary gets its leading space after each special token, not only at the beginning.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from fairlead_worker.weights.gguf.reader import Gguf, GgufError
from fairlead_worker.weights.gguf.splits import SPLITS

UNKNOWN, CONTROL, USER_DEFINED, BYTE = 2, 3, 4, 6
"""Types of tokens that are not ordinary text (`tokenizer.ggml.token_type`)."""
SPACE = "▁"
"""A space in a SentencePiece vocabulary."""
LONGEST = 1024
"""Characters of a SentencePiece token: its merges take time and memory with the square of its length."""
END_TEXTS = frozenset(
    ("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|endoftext|>", "<|eom_id|>", "<|end_of_text|>", "<end_of_turn>", "<EOT>")
)
"""Control tokens that end an answer, as in llama.cpp: a file names one EOS, and chat models end turns with another."""
_NAMES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
_END_KEYS = ("eos", "eot", "eom")


class Vocabulary:
    """The checked arrays of `tokenizer.ggml`. Raises GgufError."""

    def __init__(self, gguf: Gguf) -> None:
        self._gguf = gguf
        self.model = self.text("model")
        self.tokens: list[str] = self._array("tokens", str)
        if not self.tokens or len(set(self.tokens)) != len(self.tokens):
            raise self.error("tokens", "is empty or names a token twice")
        rows = gguf.tensors["token_embd.weight"].shape[0]
        if len(self.tokens) > rows:
            raise self.error("tokens", f"has {len(self.tokens)} tokens, and token_embd.weight {rows} rows")
        self.types: list[int] = self._array("token_type", int, len(self.tokens)) or [1] * len(self.tokens)
        self.scores: list[float] = self._array("scores", float, len(self.tokens)) or [0.0] * len(self.tokens)
        self.merges: list[str] = self._array("merges", str)

    def get(self, name: str, default: Any = None) -> Any:
        return self._gguf.metadata.get(f"tokenizer.ggml.{name}", default)

    def text(self, name: str, default: str = "") -> str:
        found = self.get(name, default)
        if not isinstance(found, str):
            raise self.error(name, f"is {repr(found)[:40]}, not a text")
        return found

    def token_id(self, name: str) -> int | None:
        """Return `NAME_token_id` of the file."""
        found = self.get(f"{name}_token_id")
        if found is not None and (not isinstance(found, int) or not 0 <= found < len(self.tokens)):
            raise self.error(f"{name}_token_id", f"is {found}, and there are {len(self.tokens)} tokens")
        return found

    def of_type(self, *types: int) -> Iterable[int]:
        return (token for token, kind in enumerate(self.types) if kind in types)

    def ids(self, spelled: list[str]) -> dict[str, int]:
        """Return the ids of tokens, which are spelled by id. The position of each is its id: no two may have one spelling."""
        found: dict[str, int] = {}
        for number, token in enumerate(spelled):
            if (first := found.setdefault(token, number)) != number:
                raise self.error(
                    "tokens", f"has {self.tokens[first]!r} ({first}) and {self.tokens[number]!r} ({number}), both for {token!r}"
                )
        return found

    def error(self, name: str, cause: str) -> GgufError:
        return GgufError(self._gguf.path, f"tokenizer.ggml.{name} {cause}: convert the model again")

    @property
    def is_gemma(self) -> bool:
        return str(self._gguf.metadata.get("general.architecture")).startswith("gemma")

    def _array(self, name: str, kind: type, length: int | None = None) -> list[Any]:
        found = self.get(name)
        if found is None:
            return []
        if not isinstance(found, list) or not all(type(one) is kind for one in found[:1]) or length not in (None, len(found)):
            raise self.error(name, f"is no array of {length or 'any number of'} {kind.__name__} values")
        return found


def make_tokenizer(vocabulary: Vocabulary) -> dict[str, Any]:
    """Return the content of tokenizer.json. Raises GgufError for a kind that is not supported."""
    makers = {"gpt2": _byte_level, "llama": _sentencepiece}
    if vocabulary.model not in makers:
        raise GgufError(
            vocabulary._gguf.path,
            f"tokenizer.ggml.model {vocabulary.model!r} is not supported ({', '.join(makers)} are): serve the model's safetensors",
        )
    return makers[vocabulary.model](vocabulary)


def _byte_level(vocabulary: Vocabulary) -> dict[str, Any]:
    """Byte-level BPE, as GPT-2's."""
    pre = vocabulary.text("pre", "default")
    if pre not in SPLITS:
        raise GgufError(
            vocabulary._gguf.path,
            f"tokenizer.ggml.pre {pre!r} is not supported ({', '.join(SPLITS)} are): serve the model's safetensors",
        )
    split, spelling = SPLITS[pre], _spelling()
    alphabet, whole = set(spelling.values()), set(vocabulary.of_type(CONTROL, USER_DEFINED))
    # A few converters write ordinary tokens as text, not in the alphabet of bytes.
    spelled = vocabulary.ids(
        [
            token if number in whole or alphabet.issuperset(token) else "".join(spelling[byte] for byte in token.encode())
            for number, token in enumerate(vocabulary.tokens)
        ]
    )
    if not vocabulary.merges:
        raise vocabulary.error("merges", "is missing or empty, so texts would become single letters")
    merges = [tuple(merge.split(" ", 1)) for merge in vocabulary.merges]
    if wrong := next((merge for merge in merges if len(merge) != 2 or not {*merge, "".join(merge)} <= spelled.keys()), None):
        raise vocabulary.error("merges", f"has {' '.join(wrong)!r}, whose parts or result are no tokens")
    patterns = [{"type": "Split", "pattern": {"Regex": each}, "behavior": "Isolated", "invert": False} for each in split.patterns]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return _assemble(
        vocabulary,
        {"vocab": spelled, "merges": merges, "ignore_merges": split.ignore_merges},
        pre_tokenizer={"type": "Sequence", "pretokenizers": [*patterns, level]},
        decoder=level,
        adds_bos=split.adds_bos,
        added=whole,
    )


def _sentencepiece(vocabulary: Vocabulary) -> dict[str, Any]:
    """SentencePiece's BPE: the pair whose token has the best score is merged first. Bytes are tokens of the last resort."""
    tokens, ranks = vocabulary.tokens, vocabulary.scores
    if (longest := max(map(len, tokens))) > LONGEST:
        raise vocabulary.error("tokens", f"has a token of {longest} characters, and {LONGEST} are the most")
    if vocabulary.is_gemma:
        # As in transformers: converters write runs of spaces as text, and give these and other added tokens no score of their own.
        tokens = [SPACE * len(token) if token and not token.strip(" ") else token for token in tokens]
        ranks = [-float(number) for number in range(len(tokens))]
    vocab = vocabulary.ids(tokens)
    whole = {number for number in vocabulary.of_type(CONTROL, USER_DEFINED) if not tokens[number].startswith(SPACE * 2)}
    prefixed = bool(vocabulary.get("add_space_prefix", True))
    unknown = vocabulary.token_id("unknown")
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    normalizers = [{"type": "Prepend", "prepend": SPACE}, replace] if prefixed else [replace]
    restore = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    decoders: list[dict[str, Any]] = [restore, {"type": "ByteFallback"}, {"type": "Fuse"}]
    if prefixed:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return _assemble(
        vocabulary,
        {
            "vocab": vocab,
            "merges": score_merges(vocab, ranks, set(vocabulary.of_type(UNKNOWN, CONTROL, BYTE))),
            "unk_token": None if unknown is None else tokens[unknown],
            "fuse_unk": True,
            "byte_fallback": True,
        },
        normalizer={"type": "Sequence", "normalizers": normalizers},
        decoder={"type": "Sequence", "decoders": decoders},
        adds_bos=True,
        added=whole,
    )


def score_merges(vocab: Mapping[str, int], ranks: list[float], unmerged: set[int]) -> list[tuple[str, str]]:
    """Return the merges that scores imply: every pair of tokens that together are one, the best score first."""
    found = []
    for token, number in vocab.items():
        if number not in unmerged:
            pairs = ((token[:at], token[at:]) for at in range(1, len(token)))
            found += [(ranks[number], len(left), left, right) for left, right in pairs if left in vocab and right in vocab]
    found.sort(key=lambda one: one[:2], reverse=True)
    return [(left, right) for _, _, left, right in found]


def _assemble(vocabulary: Vocabulary, model: dict[str, Any], *, adds_bos: bool, added: set[int], **parts: Any) -> dict[str, Any]:
    tokens = list(model["vocab"])
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": number, "content": tokens[number], **flags, "special": vocabulary.types[number] == CONTROL} for number in sorted(added)
        ],
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": _template(vocabulary, tokens, adds_bos),
        "model": {"type": "BPE", "dropout": None, "continuing_subword_prefix": None, "end_of_word_suffix": None, **model},
        **parts,
    }


def _template(vocabulary: Vocabulary, tokens: list[str], adds_bos: bool) -> dict[str, Any] | None:
    """Return what puts BOS before and EOS after a text."""
    wanted = [("bos", vocabulary.get("add_bos_token", adds_bos)), ("eos", vocabulary.get("add_eos_token", False))]
    ids = {name: number for name, add in wanted if add and (number := vocabulary.token_id(name)) is not None}
    if not ids:
        return None
    text = {"Sequence": {"id": "A", "type_id": 0}}
    single: list[dict[str, Any]] = [text]
    for name, number in ids.items():
        single.insert(0 if name == "bos" else len(single), {"SpecialToken": {"id": tokens[number], "type_id": 0}})
    special = {tokens[number]: {"id": tokens[number], "ids": [number], "tokens": [tokens[number]]} for number in ids.values()}
    return {"type": "TemplateProcessing", "single": single, "pair": [*single, text], "special_tokens": special}


def _spelling() -> dict[int, str]:
    """Return GPT-2's alphabet: printable bytes are themselves, and the others are the characters from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    return {byte: chr(byte) for byte in printable} | {byte: chr(0x100 + place) for place, byte in enumerate(others)}


def special_tokens(vocabulary: Vocabulary) -> dict[str, str]:
    """Return the names of special tokens for tokenizer_config.json."""
    found = {f"{name}_token": vocabulary.token_id(key) for name, key in _NAMES.items()}
    return {name: vocabulary.tokens[number] for name, number in found.items() if number is not None}


def end_tokens(vocabulary: Vocabulary) -> list[int]:
    """Return the tokens that end an answer, EOS first."""
    named = [number for key in _END_KEYS if (number := vocabulary.token_id(key)) is not None]
    by_text = [number for number in vocabulary.of_type(CONTROL) if vocabulary.tokens[number] in END_TEXTS]
    return list(dict.fromkeys((*named, *by_text)))
