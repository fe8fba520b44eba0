"""Stage: nano-vllm's published workload on Qwen3-0.6B's shape: 256 requests at once, prompts and answers of 100 to 1,024 tokens.

From its bench.py: `random.seed(0)`, prompts of tokens below 10,000, temperature 0.6, `ignore_eos`, a request before the clock starts. It
reports 1,434 tokens/s on a laptop's RTX 4070 and vLLM's 1,362 there: on another device the figure stands for itself.
"""

import random
import time
from collections.abc import Iterator
from typing import Any

from bench.gpu.device import Device
from bench.gpu.loop import Loop
from bench.gpu.roofline import beside_roofline, rates_of, requests_work
from bench.gpu.shared_model import Kit


def measure(device: Device, kit: Kit) -> Iterator[dict[str, Any]]:
    """Output tokens a second of all requests, plain and with steps ahead and graphs, beside the fewest steps that these requests take."""
    requests, least, most = (256, 100, 1024) if not device.tiny else (4, 5, 12)
    draw = random.Random(0)
    prompts = [[draw.randint(0, 10_000 if not device.tiny else 900) for _ in range(draw.randint(least, most))] for _ in range(requests)]
    lengths = [draw.randint(least, most) for _ in range(requests)]
    rates, shape = rates_of(device), "tiny-qwen" if device.tiny else "qwen"
    work = requests_work(shape, [(len(prompt), length) for prompt, length in zip(prompts, lengths, strict=True)])
    runner = kit.runner("qwen", requests * -(-2 * most // 16) + 64, requests)
    graphs = runner.graphs
    try:
        for what, overlap in (("steps ahead, graphs", True), ("the plain loop", False)):
            runner.graphs = graphs if overlap else None
            loop = Loop(runner, overlap, max_num_seqs=requests, chunked_prefill_size=8192, max_prefill_tokens=8192)
            loop.submit(-1, [1, 2, 3], 8)
            loop.run()
            device.wait()
            began = time.perf_counter()
            for number, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
                loop.submit(number, prompt, length, temperature=0.6, seed=number)
            loop.run()
            seconds = time.perf_counter() - began
            counts = [len(loop.tokens[number]) for number in range(requests)]
            row = {
                "what": f"Qwen3-0.6B, nano-vllm's workload, {what}",
                "output_tokens": sum(counts),
                "seconds": seconds,
                "graphs": runner.graphs is not None,
            }
            row |= {"tokens_per_s": sum(counts) / seconds, "ok": counts == lengths}
            yield beside_roofline(row, rates, work, seconds)
    finally:
        runner.graphs = graphs
        kit.drop()
