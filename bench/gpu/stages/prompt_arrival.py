"""Stage: a long prompt arrives while streams run: the longest wait for a token beside the usual one, by chunk size and by ITL target.

The usual wait and the prompt's time stand beside their rooflines. The longest wait has none: it depends on the chunk, and has a bar.
"""

import random
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from bench.gpu.device import Device, median
from bench.gpu.loop import Loop
from bench.gpu.model import SHAPES
from bench.gpu.report import beside
from bench.gpu.roofline import Rates, decode_work, prefill_work, rates_of
from bench.gpu.shared_model import Kit
from fairlead_worker.execution.runner import ModelRunner

TARGET = 1.7
"""Times the usual wait, as --itl-target-ms: the bar is 2."""


def measure(device: Device, kit: Kit) -> Iterator[dict[str, Any]]:
    """A row for each way to cut the prompt. The bar is for the target's, which comes second: the first one tells the usual wait."""
    streams, context, long, quiet = (32, 1024, 32_768, 100) if not device.tiny else (2, 20, 90, 6)
    shape = "tiny" if device.tiny else "8b"
    runner = kit.shared(streams * -(-(context + 2048) // 16) + 2 * -(-long // 16) + 64, streams)
    target, rates = 0.0, rates_of(device)
    for chunk in (8192, 2048, 512) if not device.tiny else (32, 16):
        row = arrive(runner, shape, rates, streams, context, long, quiet, chunked_prefill_size=chunk)
        yield {"what": f"{long} tokens at {streams} streams, chunks of {chunk}", **row}
        if target:
            continue
        target = TARGET * row["usual_ms"]
        row = arrive(runner, shape, rates, streams, context, long, quiet, chunked_prefill_size=chunk, itl_target_ms=target)
        yield beside({"what": f"{long} tokens at {streams} streams, --itl-target-ms {target:.1f}", **row}, "worst_of_usual", most=2.0)


def arrive(
    runner: ModelRunner, shape: str, rates: Rates, streams: int, context: int, long: int, quiet: int, **settings: Any
) -> dict[str, Any]:
    """Waits between a stream's tokens: before the prompt comes (the median is the usual one), and until its first token is there. A prompt
    of an eighth goes before, from which step times are learnt."""
    draw, vocabulary = random.Random(7), SHAPES[shape]["vocab_size"]

    def prompt(tokens: int) -> list[int]:
        return [draw.randrange(10, vocabulary) for _ in range(tokens)]

    loop = Loop(runner, overlap=True, max_num_seqs=streams + 2, **settings)
    for number in range(streams):
        loop.submit(number, prompt(context), 2000)
    loop.pretend()
    first, second = streams, streams + 1
    loop.submit(first, prompt(long // 8), 1)
    loop.run(lambda: not loop.tokens[first])
    before = len(loop.times[0])
    loop.run(lambda: len(loop.times[0]) < before + quiet)
    usual = median(gaps(loop, streams, before, before + quiet))
    begin = len(loop.times[0])
    loop.submit(second, prompt(long), 1)
    loop.run(lambda: not loop.tokens[second])
    during = gaps(loop, streams, begin - 1, len(loop.times[0]))
    ttft = loop.times[second][0] - loop.times[0][begin - 1]
    steps = sum(at <= loop.times[second][0] for at in loop.times[0][begin:])
    moved, flops = decode_work(shape, streams, context + begin + steps / 2)
    told = {"usual_ms": usual * 1e3, "median_ms": median(during) * 1e3, "worst_ms": max(during) * 1e3, "ttft_s": ttft}
    told["usual_of_roofline"] = rates.share(decode_work(shape, streams, context + before + quiet / 2), usual)
    told["ttft_of_roofline"] = rates.share((steps * moved, steps * flops + prefill_work(shape, long)[1]), ttft)
    return {**told, "worst_of_usual": max(during) / usual, "worst_of_median": max(during) / median(during)}


def gaps(loop: Loop, streams: int, begin: int, end: int) -> list[float]:
    """Seconds between the tokens of each stream, from its token `begin` to `end`."""
    return [later - sooner for number in range(streams) for sooner, later in pairwise(loop.times[number][begin:end])]
