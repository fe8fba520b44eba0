"""Stage: what launching steps ahead and CUDA graphs are worth, off and on in turns, and that they say the same tokens; a chunk;
what `--deterministic` costs."""

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from bench.gpu.device import Device, median
from bench.gpu.model import save_llama, scheduler_for, submit, weight_bytes
from bench.gpu.speed import roofline

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
from fairlead_worker.execution.invariant import NotInvariant, check_invariance, settle
from fairlead_worker.execution.runner import ModelRunner
from fairlead_worker.kernels.base import KVSpec
from fairlead_worker.messages import Output, Sampling
from fairlead_worker.model.fixed_rows import fix_rows
from fairlead_worker.model.loader import load_model

TURNS = 3


class Eager:
    """In the place of graphs where there is no GPU: the same calls on the same memory."""

    def record(self, run: Any) -> Any:
        output = run().clone()
        return lambda: output.copy_(run())


def measure(device: Device) -> Iterator[dict[str, Any]]:
    """Decodes of several batches at a context of 2k: tokens a second of each way, the median of turns that alternate, and the share of
    what this device's memory would allow (weights and KV read once a step). Then a chunk, beside what its products would allow, and the
    plain way again under `--deterministic`.
    """
    batches, context, new = ((1, 16, 64, 256), 2048, 64) if not device.tiny else ((1, 3), 24, 6)
    shape, plain = "tiny" if device.tiny else "8b", dict[int, float]()
    with tempfile.TemporaryDirectory() as folder:
        loaded = load_model(str(save_llama(device, Path(folder), shape)), dtype="bfloat16", device=device.device)
        pages = 2 * batches[-1] * -(-(context + new + 16) // 16) // (1 if device.tiny else 2) + 64
        runner = ModelRunner(loaded, device.flashinfer(KVSpec(loaded.layers, 16, loaded.dtype, loaded.device), pages))
        rates, began = roofline(device), time.perf_counter()
        graphs = graphs_for(runner.forward, runner.backend, batches[-1], context + new, None if device.cuda else Eager())
        assert graphs is not None, "every kind of layer is FlashInfer's"
        graphs.capture()
        device.wait()
        yield {"what": "capturing", "sizes": len(graphs.sizes), "seconds": time.perf_counter() - began, "ok": graphs.recorded}
        for batch in batches:
            row = _row(device, runner, graphs, batch, context, new, shape, rates["gb_per_s"])
            plain[batch] = row["plain_tokens_per_s"]
            yield row
        yield _chunk(device, runner, 8128 if not device.tiny else 24, shape, rates["tflops"])
        yield from _deterministic(device, runner, context, new, plain)


def _row(
    device: Device, runner: ModelRunner, graphs: GraphedDecodes, batch: int, context: int, new: int, shape: str, gb_per_s: float
) -> dict[str, Any]:
    ways = {"plain": (False, False), "overlap": (True, False), "graphs": (False, True), "both": (True, True)}
    rates: dict[str, list[float]] = {name: [] for name in ways}
    said: dict[str, dict[str, list[int]]] = {}
    for _ in range(1 if device.tiny else TURNS):
        for name, (overlap, graphed) in ways.items():
            runner.graphs = graphs if graphed else None
            seconds, said[name] = decode(device, runner, batch, context, new, overlap)
            rates[name].append(batch * (new - 1) / seconds)
    runner.graphs = None
    spec = runner.backend.spec
    read = sum(weight_bytes(shape)) + batch * (context + new // 2) * spec.page_bytes / spec.page_size
    row: dict[str, Any] = {"what": f"decode, batch {batch}"}
    for name, found in rates.items():
        row |= {f"{name}_tokens_per_s": median(found), f"{name}_of_ideal": median(found) / batch * read / (gb_per_s * 1e9)}
    # Graphs pad batches, which may turn bfloat16's last bit; launching ahead computes the same steps.
    return row | {
        "ok": said["overlap"] == said["plain"] and said["both"] == said["graphs"],
        "graphs_equal": said["graphs"] == said["plain"],
    }


def _chunk(device: Device, runner: ModelRunner, tokens: int, shape: str, tflops: float) -> dict[str, Any]:
    """A row: one prompt in one step."""
    scheduler = scheduler_for(runner, chunked_prefill_size=0)
    submit(scheduler, 0, range(10, 10 + tokens), Sampling(max_tokens=1, temperature=0, ignore_eos=True))
    plan = scheduler.plan()
    seconds = device.seconds(lambda: runner.execute(plan), 5)
    heads = sum(layer.heads * layer.key_dim for layer in runner.backend.spec.layers)
    work = weight_bytes(shape)[0] * tokens + 4 * heads * tokens * (tokens + 1) / 2
    ideal = work / (tflops * 1e12)
    return {"what": f"a chunk of {tokens}", "seconds": seconds, "tokens_per_s": tokens / seconds, "of_ideal": ideal / seconds}


def _deterministic(device: Device, runner: ModelRunner, context: int, new: int, plain: dict[int, float]) -> Iterator[dict[str, Any]]:
    """Of the same model and pages, which are so from now on."""
    settle(device.device)
    fix_rows(runner.loaded.model)
    runner.backend.invariant = True  # type: ignore[attr-defined]  # FlashInfer's
    try:
        check_invariance(runner)
        yield {"what": "deterministic", "kept": True}
    except NotInvariant as error:
        yield {"what": "deterministic", "kept": False, "said": str(error)}
    for batch, before in plain.items():
        rate = batch * (new - 1) / decode(device, runner, batch, context, new, overlap=False)[0]
        yield {"what": f"decode, batch {batch}, deterministic", "tokens_per_s": rate, "of_plain": rate / before}


def decode(device: Device, runner: ModelRunner, batch: int, context: int, new: int, overlap: bool) -> tuple[float, dict[str, list[int]]]:
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
