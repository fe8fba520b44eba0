"""Seeded prompts as token ids. The same arguments give the same prompts."""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from fairlead.errors import UserError, reading

TRACE_BLOCK = 512
"""Tokens that one entry of a Mooncake trace's `hash_ids` stands for (github.com/kvcache-ai/Mooncake, FAST25-release)."""


@dataclass(frozen=True)
class Prompt:
    """One prompt. `output_len`: tokens to generate. `at`: seconds after the start, from a trace (None: the request rate decides)."""

    tokens: tuple[int, ...]
    output_len: int
    at: float | None = None


def random_prompts(
    vocabulary: Sequence[int], *, count: int, input_len: int, output_len: int, range_ratio: float, prefix_len: int, seed: int
) -> list[Prompt]:
    """Return random prompts of `prefix_len` shared and `input_len` own tokens. Lengths vary uniformly by ±`range_ratio`."""
    if not 0 <= range_ratio < 1:
        raise UserError(f"--random-range-ratio {range_ratio}: must be at least 0 and below 1")
    rng = random.Random(seed)
    prefix = tuple(rng.choices(vocabulary, k=prefix_len))
    prompts = []
    for _ in range(count):
        length, output = _vary(rng, input_len, range_ratio), _vary(rng, output_len, range_ratio)
        prompts.append(Prompt(prefix + tuple(rng.choices(vocabulary, k=length)), output))
    return prompts


def prefix_repetition_prompts(
    vocabulary: Sequence[int], *, count: int, prefix_len: int, suffix_len: int, prefixes: int, output_len: int, seed: int
) -> list[Prompt]:
    """Return `count` shuffled prompts with `prefixes` different prefixes: the workload for prefix-aware routing."""
    if not 1 <= prefixes <= count:
        raise UserError(f"--prefix-repetition-num-prefixes {prefixes}: must be 1 to --num-prompts {count}")
    rng = random.Random(seed)
    heads = [tuple(rng.choices(vocabulary, k=prefix_len)) for _ in range(prefixes)]
    prompts = [Prompt(heads[n % prefixes] + tuple(rng.choices(vocabulary, k=suffix_len)), output_len) for n in range(count)]
    rng.shuffle(prompts)
    return prompts


def trace_prompts(vocabulary: Sequence[int], path: Path, *, count: int, speed: float, scale: float, seed: int) -> list[Prompt]:
    """Return the first `count` requests of a Mooncake trace. Equal `hash_ids` become equal tokens, so prefixes are shared as recorded.

    `speed` divides the times (2: twice as fast); `scale` multiplies all lengths, and the block with them (0.1: a tenth of the tokens).
    """
    if not (speed > 0 and scale > 0):
        raise UserError(f"--trace-speed {speed} and --trace-scale {scale} must be above 0")
    block = max(1, round(TRACE_BLOCK * scale))
    prompts = []
    with reading("--trace-path", path), path.open() as file:
        for number, line in enumerate(islice(file, count), start=1):
            try:
                entry = json.loads(line)
                length, output = max(1, round(entry["input_length"] * scale)), max(1, round(entry["output_length"] * scale))
                tokens: list[int] = []
                for block_id in entry["hash_ids"]:
                    tokens += random.Random(f"{seed}/{block_id}").choices(vocabulary, k=block)
                tokens += random.Random(f"{seed}/{number}/rest").choices(vocabulary, k=max(0, length - len(tokens)))
                prompts.append(Prompt(tuple(tokens[:length]), output, entry["timestamp"] / 1000 / speed))
            except (ValueError, KeyError, TypeError, OverflowError) as error:
                raise UserError(f"--trace-path {path}, line {number}: not a Mooncake trace entry ({error!r})") from None
    if not prompts:
        raise UserError(f"--trace-path {path}: it contains no request")
    return prompts


def _vary(rng: random.Random, length: int, ratio: float) -> int:
    return max(1, rng.randint(int(length * (1 - ratio)), int(length * (1 + ratio))))
