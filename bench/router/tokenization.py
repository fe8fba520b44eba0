"""Time from chat messages to token ids and block hashes in a growing chat, with and without the token cache.

Each turn is measured both ways in a conversation that grows to about 40,000 tokens, and the tokens must be equal. `cold` is the cost of a
conversation that the cache has never seen. The tokenizer is byte-level BPE with a split like Qwen's and Llama 3's, trained on Python's own
documentation; the template is ChatML. For scale: TensorRT-LLM reports 43.7 -> 5.5 ms for 38,000 tokens (NVIDIA/TensorRT-LLM#18389).
"""

import random
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from bench.common.report import make_parser, write_report
from fairlead.random_model.tokenizer import CHAT_TEMPLATE, SPECIAL_TOKENS, corpus
from fairlead_common.prompts.encoder import PromptEncoder, PromptFormat, digest
from fairlead_common.prompts.token_cache import TokenCache
from fairlead_index.hashing import block_hashes, prompt_root

SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
BLOCK_TOKENS = 64
Chat = list[dict[str, Any]]


def make_format() -> PromptFormat:
    """Return a tokenizer of 9,000 tokens and its template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(SPLIT), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=9000, show_progress=False, special_tokens=list(SPECIAL_TOKENS), initial_alphabet=alphabet)
    tokenizer.train_from_iterator(corpus(), trainer)
    text = tokenizer.to_str()
    return PromptFormat(
        tokenizer_json=text,
        tokenizer_digest=digest(text),
        model_digest="bench",
        model_names=["bench"],
        block_tokens=BLOCK_TOKENS,
        max_model_len=1 << 20,
        chat_template=CHAT_TEMPLATE,
    )


def conversation(turns: int, words: int, seed: int) -> Chat:
    """Return `turns` questions with answers of `words` words together, and one more question."""
    source = " ".join(corpus()).split()
    chance = random.Random(seed)

    def text(count: int) -> str:
        at = chance.randrange(len(source) - count)
        return " ".join(source[at : at + count])

    chat: Chat = [{"role": "system", "content": text(400)}]
    for _ in range(turns):
        chat += [{"role": "user", "content": text(words // 4)}, {"role": "assistant", "content": text(words - words // 4)}]
    return [*chat, {"role": "user", "content": text(words // 4)}]


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Return the milliseconds and the result."""
    began = time.perf_counter()
    result = work()
    return 1000 * (time.perf_counter() - began), result


def measure(format: PromptFormat, turns: int, words: int, seed: int) -> dict[str, float]:
    """Return the medians over the last quarter of a conversation's turns."""
    plain, cache = PromptEncoder(format), TokenCache(64 << 20)
    cached = PromptEncoder(format, cache)
    chat = conversation(turns, words, seed)
    root = prompt_root(format)
    rows: list[dict[str, float]] = []

    def prepared(encoder: PromptEncoder, messages: Chat) -> Any:
        tokens = encoder.encode_chat(messages)
        return tokens, block_hashes(root, tokens, BLOCK_TOKENS)

    for turn in range(1, turns + 2):
        messages = chat[: 2 * turn]
        uncached_ms, (expected, hashes) = timed(partial(prepared, plain, messages))
        cached_ms, found = timed(partial(prepared, cached, messages))
        assert found == (expected, hashes), "cached tokens differ"
        render_ms, text = timed(partial(plain.render_chat, messages))
        hash_ms, _ = timed(partial(block_hashes, root, expected, BLOCK_TOKENS))
        cold_ms, _ = timed(lambda: prepared(PromptCold.of(cached), messages))  # noqa: B023  # called now
        row = {"uncached ms": uncached_ms, "cached ms": cached_ms, "cold ms": cold_ms, "render ms": render_ms, "hash ms": hash_ms}
        rows.append(row | {"tokens": len(expected), "characters": len(text)})
    last = rows[-max(1, len(rows) // 4) :]
    middle = {name: statistics.median(row[name] for row in last) for name in last[0]}
    return middle | {"uncached / cached": statistics.median(row["uncached ms"] / row["cached ms"] for row in last)}


class PromptCold(PromptEncoder):
    """Return an encoder with an empty cache, without loading the tokenizer again."""

    @classmethod
    def of(cls, other: PromptEncoder) -> "PromptCold":
        cold = cls.__new__(cls)
        cold.__dict__ = {**other.__dict__, "_cache": TokenCache(64 << 20)}
        return cold


def main() -> None:
    """Print a table, and write the report if `--json` is given."""
    parser = make_parser(__name__, __doc__)
    parser.add_argument("--turns", type=int, default=64)
    parser.add_argument("--words", type=int, default=330, help="words of one turn, question and answer")
    parser.add_argument("--repeats", type=int, default=3, help="conversations")
    options = parser.parse_args()
    format = make_format()
    rows = [measure(format, options.turns, options.words, seed) for seed in range(options.repeats)]
    names = list(rows[0])
    print("".join(f"{name:>20}" for name in names))
    for row in rows:
        print("".join(f"{row[name]:20.2f}" for name in names))
    write_report(__name__, options, rows)
