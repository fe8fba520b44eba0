"""Write the small tokenizer files of this folder, and what their own libraries make of some texts.

    pip install sentencepiece mistral-common && python tests/worker/weights/tokenizer_data/make.py

Neither library is part of Fairlead's environments, whose images have to read these files without them.
"""

import base64
import json
import os
import random
from pathlib import Path
from typing import Any

import sentencepiece
from mistral_common.tokens.tokenizers.tekken import Tekkenizer
from tokenizers import ByteLevelBPETokenizer

HERE = Path(__file__).parent
PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CORPUS = [
    "The grey harbour wakes before the town does. Boats leave one after another, and nobody on the quay says a word.",
    "Prices rose by 3.5 % in 2021, but wages did not; that is why the council met again on Monday, 14 June.",
    "def add(left, right):\n    if left is None:\n        return right\n    return left + right\n",
    "Größere Schiffe müssen warten. Señor Núñez está aquí. Où est la gare ? 東京は大きい。",
    '{"name": "harbour", "boats": [1, 2, 3], "open": true, "note": "a <sep> b"}',
]
TEXTS = [
    *CORPUS,
    "",
    " ",
    "   ",
    " lead",
    "trail ",
    "two  spaces\n\n\ttab\r\n",
    "a\nb\n\nc <sep>d<sep> e",
    "    indented\n        more",
    "🙂🙃 \u200b ☃ a\u0301 ﬁ ① Ａ \x00\x01 ÿ",
    "▁ literal",
    "1234567890",
    "x" * 60,
]
MODELS: dict[str, dict[str, Any]] = {
    "bpe": {"model_type": "bpe", "byte_fallback": True, "remove_extra_whitespaces": False},
    "symbols": {
        "model_type": "bpe",
        "byte_fallback": True,
        "remove_extra_whitespaces": False,
        "user_defined_symbols": ["\n", "▁▁", "<sep>"],
    },
    "gemma": {
        "model_type": "bpe",
        "byte_fallback": True,
        "add_dummy_prefix": False,
        "remove_extra_whitespaces": False,
        "user_defined_symbols": ["\n", "\n\n", "▁▁", "▁▁▁", "▁▁▁▁", "<sep>"],
    },
    "unigram": {"model_type": "unigram"},
    "bytes": {"model_type": "unigram", "byte_fallback": True},
    "normalized": {"model_type": "bpe", "normalization_rule_tsv": "rules.tsv"},
}


def main() -> None:
    os.chdir(HERE)
    chance = random.Random(0)
    alphabet = "abcdeABC  \n\t.,()éßñ東🙂123_-<>"
    texts = TEXTS + ["".join(chance.choices(alphabet, k=chance.randint(1, 40))) for _ in range(60)]
    (HERE / "rules.tsv").write_text("FB01\t66 69\nFF21\t41\n2460\t31\n")  # ﬁ, full-width A, ①
    expected: dict[str, list[list[int]]] = {}
    for name, options in MODELS.items():
        given = {"normalization_rule_name": "identity"} if "normalization_rule_tsv" not in options else {}
        lines = [line for text in CORPUS for line in text.split("\n")] * 3
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_prefix=name,  # the file keeps it
            vocab_size=420,
            hard_vocab_limit=False,
            character_coverage=0.99,
            control_symbols=["[INST]"],
            minloglevel=2,
            **given,
            **options,
        )
        (HERE / f"{name}.vocab").unlink()
        processor = sentencepiece.SentencePieceProcessor(model_file=str(HERE / f"{name}.model"))
        expected[name] = [processor.encode(text) for text in texts]
    (HERE / "rules.tsv").unlink()
    for name, special in (("tekken", True), ("tekken_first", False)):
        (HERE / f"{name}.json").write_text(json.dumps(tekken(special)))
        tekkenizer = Tekkenizer.from_file(HERE / f"{name}.json")
        expected[name] = [tekkenizer.encode(text, bos=False, eos=False) for text in texts]
    (HERE / "expected.json").write_text(json.dumps({"texts": texts, "ids": expected}))


def tekken(names_special_tokens: bool) -> dict[str, Any]:
    """Return a file in Tekken's form. The first files did not name their special tokens."""
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(CORPUS, vocab_size=400, min_frequency=1, show_progress=False)
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    byte_of = {chr(byte): byte for byte in printable} | {chr(0x100 + place): byte for place, byte in enumerate(others)}
    merged = [bytes(byte_of[each] for each in token) for token, _ in sorted(trained.get_vocab().items(), key=lambda one: one[1])]
    tokens = [bytes([byte]) for byte in range(256)] + [token for token in merged if len(token) > 1]
    vocab = [{"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None} for rank, token in enumerate(tokens)]
    special = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "<pad>"] + [f"[C{at}]" for at in range(6, 16)]
    config = {
        "pattern": PATTERN,
        "num_vocab_tokens": len(tokens),
        "default_vocab_size": len(tokens) + 32,
        "default_num_special_tokens": 32,
        "version": "v7" if names_special_tokens else "v3",
    }
    named = [{"rank": rank, "token_str": token, "is_control": True} for rank, token in enumerate(special)]
    return {"config": config, "vocab": vocab} | ({"special_tokens": named} if names_special_tokens else {})


if __name__ == "__main__":
    main()
