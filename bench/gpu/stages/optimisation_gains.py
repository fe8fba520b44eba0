"""Stage: what each optimisation is worth, in one table from one run: everything on, then each of them off, taking turns."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from bench.gpu.device import Device, median
from bench.gpu.model import scheduler_for, submit
from bench.gpu.roofline import Rates, beside_roofline, decode_work, prefill_work, rates_of
from bench.gpu.shared_model import Kit, make, recorded
from bench.gpu.stages.overlap import decode, restore_torch
from fairlead_worker.execution.batch_invariance import configure_torch
from fairlead_worker.execution.cuda_graphs.decodes import GraphedDecodes
from fairlead_worker.execution.runner import ModelRunner
from fairlead_worker.ipc.messages import Sampling
from fairlead_worker.kernels.reference import ReferenceBackend
from fairlead_worker.model.fixed_rows import fix_rows

TURNS = 3


@dataclass(frozen=True)
class Way:
    """How steps are run."""

    runner: ModelRunner
    graphs: GraphedDecodes | None
    overlap: bool


def measure(device: Device, kit: Kit) -> Iterator[dict[str, Any]]:
    """A row for each optimisation and batch of decodes at a context of 2k: tokens a second with all of them, without this one, and the
    ratio; then chunks of one prompt by size and with nothing fused; last `--deterministic`, which changes the model."""
    batches, context, new = ((1, 16, 64 if kit.large else 32), 2048, 32) if not device.tiny else ((1, 2), 24, 4)
    shape, prompt = ("tiny", 64) if device.tiny else ("8b", 8192)
    pages = batches[-1] * -(-(context + new + 16) // 16) + prompt // 16 + 64
    rates = rates_of(device)
    kit.drop()  # a smaller one: there are three beside each other
    runner = kit.runner(shape, pages, batches[-1])
    graphs, runner.graphs = runner.graphs, None
    unfused = make(device, shape, pages, fuse=())
    reference = ModelRunner(runner.loaded, ReferenceBackend(runner.backend.spec, pages))
    for part in (*reference.backend.keys, *reference.backend.values):  # type: ignore[attr-defined]  # the reference's
        part.normal_()
    ways = {
        "everything": Way(runner, graphs, True),
        "graphs": Way(runner, None, True),
        "steps ahead": Way(runner, graphs, False),
        "both of these": Way(runner, None, False),
        "fused layers": Way(unfused, recorded(device, unfused, batches[-1]), True),
        "FlashInfer with its graphs": Way(reference, None, True),
    }
    yield {"what": "everything", "graphs": graphs is not None, "fused": ", ".join(runner.loaded.fused) or "projections"}
    try:
        for batch in batches:
            yield from table(device, ways, shape, rates, batch, context, new)
        yield from chunks(device, runner, unfused, shape, rates, prompt)
        yield from deterministic(device, runner, shape, rates, batches, context, new)
    finally:
        restore_torch()
        del runner, graphs, unfused, reference, ways
        kit.drop()


def table(device: Device, ways: dict[str, Way], shape: str, rates: Rates, batch: int, context: int, new: int) -> Iterator[dict[str, Any]]:
    """Decodes of one batch: turns that alternate, the median of each way. A way that takes long has one turn."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(1 if device.tiny else TURNS):
        for name, way in ways.items():
            if turn and found[name][0] < found["everything"][0] / 8:
                continue
            way.runner.graphs = way.graphs
            seconds, _ = decode(device, way.runner, batch, context, new, way.overlap)
            way.runner.graphs = None
            found[name].append(batch * (new - 1) / seconds)
    on, work = median(found["everything"]), decode_work(shape, batch, context + new / 2)
    for name in list(ways)[1:]:
        yield off_and_on(f"{name}, decode, batch {batch}", rates, work, batch, batch / median(found[name]), batch / on)


def off_and_on(what: str, rates: Rates, work: tuple[float, float], tokens: int, off: float, on: float) -> dict[str, Any]:
    """A row: tokens a second without an optimisation and with it, each beside the roofline; `off`, `on`: seconds of `work`."""
    row = {"what": what, "off_tokens_per_s": tokens / off, "on_tokens_per_s": tokens / on, "worth": off / on}
    return row | {"off_of_roofline": rates.share(work, off), "on_of_roofline": rates.share(work, on)}


def chunks(device: Device, runner: ModelRunner, unfused: ModelRunner, shape: str, rates: Rates, prompt: int) -> Iterator[dict[str, Any]]:
    """One prompt, whole and in chunks, and whole with nothing fused."""

    def through(tested: ModelRunner, chunk: int) -> Callable[[], None]:
        def run() -> None:
            scheduler = scheduler_for(tested, chunked_prefill_size=chunk, max_prefill_tokens=prompt)
            submit(scheduler, 0, range(10, 10 + prompt), Sampling(max_tokens=1, temperature=0, ignore_eos=True))
            while plan := scheduler.plan():
                scheduler.advance(plan, tested.execute(plan))

        return run

    whole = device.seconds(through(runner, 0), 3)
    off = device.seconds(through(unfused, 0), 3)
    work = prefill_work(shape, prompt)
    yield off_and_on(f"fused layers, a prompt of {prompt}", rates, work, prompt, off, whole)
    for chunk in (4096, 2048, 1024, 512, 256) if not device.tiny else (32,):
        cut = device.seconds(through(runner, chunk), 3)
        row = {"what": f"a prompt of {prompt} in chunks of {chunk}", "tokens_per_s": prompt / cut, "of_whole": whole / cut}
        yield beside_roofline(row, rates, (work[0] * -(-prompt // chunk), work[1]), cut)  # each chunk reads the weights


def deterministic(
    device: Device, runner: ModelRunner, shape: str, rates: Rates, batches: tuple[int, ...], context: int, new: int
) -> Iterator[dict[str, Any]]:
    """Off and on, without graphs, which it has none of."""
    before = {batch: decode(device, runner, batch, context, new, True)[0] / (new - 1) for batch in batches}
    configure_torch(device.device)
    fix_rows(runner.loaded.model)
    runner.backend.batch_invariant = True  # type: ignore[attr-defined]  # FlashInfer's
    for batch, off in before.items():
        on = decode(device, runner, batch, context, new, True)[0] / (new - 1)
        work = decode_work(shape, batch, context + new / 2)
        yield off_and_on(f"--deterministic, decode, batch {batch}", rates, work, batch, off, on)
