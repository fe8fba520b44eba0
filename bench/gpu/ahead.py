"""Stage: what launching steps ahead and CUDA graphs are worth, off and on in turns, and that they say the same tokens."""

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from bench.gpu.device import Device, median
from bench.gpu.model import save_llama, submit

from fairlead_index.hashing import extend
from fairlead_worker.cache.pages import PagePool
from fairlead_worker.cache.prefix import PrefixCache
from fairlead_worker.engine.config import SchedulerConfig
from fairlead_worker.engine.lookahead import LookaheadScheduler
from fairlead_worker.engine.overlap import Overlap
from fairlead_worker.engine.plan import StepPlan, StepResult
from fairlead_worker.engine.watch import StepWatch
from fairlead_worker.execution.ahead import OverlappedRunner
from fairlead_worker.execution.graphs import GraphedDecodes, graphs_for
from fairlead_worker.execution.runner import ModelRunner
from fairlead_worker.kernels.base import KVSpec
from fairlead_worker.messages import Output, Sampling
from fairlead_worker.model.loader import load_model

TURNS = 3


class Eager:
    """In the place of graphs where there is no GPU: the same calls on the same memory."""

    def record(self, run: Any) -> Any:
        output = run().clone()
        return lambda: output.copy_(run())


def measure(device: Device) -> Iterator[dict[str, Any]]:
    """Decodes of several batches at a context of 2k; tokens a second of each way, the median of turns that alternate."""
    batches, context, new = ((1, 16, 64, 256), 2048, 64) if not device.tiny else ((1, 3), 24, 6)
    with tempfile.TemporaryDirectory() as folder:
        loaded = load_model(str(save_llama(device, Path(folder), "tiny" if device.tiny else "8b")), dtype="bfloat16", device=device.device)
        pages = 2 * batches[-1] * -(-(context + new + 16) // 16) // (1 if device.tiny else 2) + 64
        runner = ModelRunner(loaded, device.flashinfer(KVSpec(loaded.layers, 16, loaded.dtype, loaded.device), pages))
        began = time.perf_counter()
        graphs = graphs_for(runner.forward, runner.backend, batches[-1], context + new, None if device.cuda else Eager())
        assert graphs is not None, "every kind of layer is FlashInfer's"
        graphs.capture()
        device.wait()
        yield {"what": "capturing", "sizes": len(graphs.sizes), "seconds": time.perf_counter() - began, "ok": graphs.recorded}
        for batch in batches:
            yield _row(device, runner, graphs, batch, context, new)


def _row(device: Device, runner: ModelRunner, graphs: GraphedDecodes, batch: int, context: int, new: int) -> dict[str, Any]:
    ways = {"plain": (False, False), "overlap": (True, False), "graphs": (False, True), "both": (True, True)}
    rates: dict[str, list[float]] = {name: [] for name in ways}
    said: dict[str, dict[str, list[int]]] = {}
    for _ in range(1 if device.tiny else TURNS):
        for name, (overlap, graphed) in ways.items():
            runner.graphs = graphs if graphed else None
            seconds, said[name] = _decode(device, runner, batch, context, new, overlap)
            rates[name].append(batch * (new - 1) / seconds)
    runner.graphs = None
    row: dict[str, Any] = {"what": f"decode, batch {batch}"} | {f"{name}_tokens_per_s": median(rate) for name, rate in rates.items()}
    # Graphs pad batches, which may turn bfloat16's last bit; launching ahead computes the same steps.
    return row | {
        "ok": said["overlap"] == said["plain"] and said["both"] == said["graphs"],
        "graphs_equal": said["graphs"] == said["plain"],
    }


def _decode(device: Device, runner: ModelRunner, batch: int, context: int, new: int, overlap: bool) -> tuple[float, dict[str, list[int]]]:
    """Seconds from the first tokens to the last, and the tokens."""
    config = SchedulerConfig(runner.loaded.max_model_len, eos_token_ids=(), max_num_seqs=batch, chunked_prefill_size=0)
    scheduler = LookaheadScheduler(config, PrefixCache(PagePool(runner.backend.pages, 16), 64, extend))
    drawn = torch.Generator().manual_seed(2)
    shared = torch.randint(10, 900, (context - 16,), generator=drawn).tolist()
    for number in range(batch):
        prompt = shared + torch.randint(10, 900, (16,), generator=drawn).tolist()
        submit(scheduler, number, prompt, Sampling(max_tokens=new, temperature=0, ignore_eos=True))
    tokens: dict[str, list[int]] = {str(number): [] for number in range(batch)}

    def tell(plan: StepPlan, result: StepResult, outputs: list[Output]) -> None:
        for output in outputs:
            tokens[output.id] += memoryview(output.tokens).cast("I").tolist()

    ahead = OverlappedRunner(runner)
    loop = Overlap(scheduler, ahead, StepWatch(), tell)
    began = 0.0
    while not scheduler.idle:
        if not began and all(tokens.values()):
            loop.settle()
            device.wait()
            began = time.perf_counter()
        if overlap:
            loop.step()
        else:
            plan = scheduler.plan()
            tell(plan, StepResult([]), scheduler.advance(plan, ahead.execute(plan)))
    loop.settle()
    return time.perf_counter() - began, tokens
