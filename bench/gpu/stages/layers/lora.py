"""Stage: decodes whose rows have LoRA adapters, in CUDA graphs and without, taking turns; that both say the same; what adapters cost."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from bench.gpu.batches import packed
from bench.gpu.device import Device, median
from bench.gpu.models.adapters import write_adapter
from bench.gpu.roofline import Rates, decode_work, rates_of
from bench.gpu.shared_model import Kit, recorded
from bench.gpu.stages.overlap import decode
from fairlead_worker.execution.cuda_graphs.decodes import GraphedDecodes
from fairlead_worker.execution.runner import ModelRunner
from fairlead_worker.kernels.base import PackedStep
from fairlead_worker.lora.adapters import AdapterSet

ADAPTERS = 8
RANK = 16
TURNS = 3
TOLERANCE = 0.05
"""Of a row's length, after all layers: in bfloat16 other orders of summation add up to 0.03 (`model.probe`)."""


def measure(device: Device, kit: Kit) -> Iterator[dict[str, Any]]:
    """Adapters on every linear layer, the rows of a batch having them in turn, at a context of 2k. For each batch: whether a graph's logits
    are the layers' own, before and after an adapter has made room for another; then tokens a second without graphs, with them, and in the
    graphs of steps without adapters."""
    batches, context, new = ((1, 16, 64), 2048, 32) if not device.tiny else ((1, 3), 24, 4)
    pages = batches[-1] * -(-(context + new + 16) // 16) + 64
    shape, rates = "8b" if not device.tiny else "tiny", rates_of(device)
    runner = kit.runner(shape, pages, batches[-1])
    plain, runner.graphs = runner.graphs, None
    adapters = AdapterSet(runner.loaded, ADAPTERS, RANK)
    try:
        with TemporaryDirectory(dir=os.environ.get("GPU_CHECK_TMP")) as folder:
            adapters.allocate_slots()
            for number in range(1, ADAPTERS + 1):
                _load(adapters, runner, Path(folder), number)
            adapted = ModelRunner(runner.loaded, runner.backend, adapters=adapters)
            graphs = recorded(device, adapted, batches[-1], adapters.slots)
            assert adapters.slots is not None
            yield {"what": "capturing", "ok": graphs is not None, "slots_gib": adapters.slots.bytes / 2**30}
            if graphs is None:
                return
            for batch in batches:
                step = _step(device, adapted, batch, context, range(1, ADAPTERS + 1))
                yield _compared(f"batch {batch}", adapted, graphs, step)
            adapters.unload(2)
            _load(adapters, runner, Path(folder), ADAPTERS + 1)
            step = _step(device, adapted, batches[-1], context, (1, ADAPTERS + 1, 3, 0))
            yield _compared("another adapter in a slot", adapted, graphs, step)
            ways = {"off": (adapted, None), "on": (adapted, graphs), "without": (runner, plain)}
            for batch in batches:
                yield _row(device, ways, shape, rates, adapters.slots.bytes / ADAPTERS, batch, context, new)
    finally:
        for number in list(adapters.infos):
            adapters.unload(number)
        del runner, adapters
        kit.drop()


def _load(adapters: AdapterSet, runner: ModelRunner, folder: Path, number: int) -> None:
    path = write_adapter(runner.loaded, folder / str(number), number, RANK)
    adapters.load(number, str(number), "random", path)


def _step(device: Device, runner: ModelRunner, batch: int, context: int, numbers: Sequence[int]) -> PackedStep:
    size, each = runner.backend.spec.page_size, -(-(context + 1) // runner.backend.spec.page_size)
    step = packed([(context, 1)] * batch, [range(row * each, (row + 1) * each) for row in range(batch)], size, device.device)
    tokens = torch.arange(10, 10 + batch, device=device.device)
    return replace(
        step,
        tokens=tokens,
        sampling=torch.arange(batch, device=device.device),
        adapters=[numbers[row % len(numbers)] for row in range(batch)],
    )


@torch.inference_mode()
def _compared(what: str, runner: ModelRunner, graphs: GraphedDecodes, step: PackedStep) -> dict[str, Any]:
    """A row: the largest difference of a row's logits over their length; and that of the adapters, to see that they do something."""
    eager = runner.run(step).float()
    replayed, without = graphs.run(step), runner.run(replace(step, adapters=())).float()
    assert replayed is not None, "every adapter has a slot"

    def apart(some: torch.Tensor) -> float:
        return float(((some - eager).norm(dim=1) / eager.norm(dim=1)).max())

    differs, adds = apart(replayed.float()), apart(without)
    return {"what": f"graphs beside hooks, {what}", "ok": differs <= TOLERANCE, "differs": differs, "adapters_add": adds}


def _row(
    device: Device,
    ways: dict[str, tuple[ModelRunner, GraphedDecodes | None]],
    shape: str,
    rates: Rates,
    each: float,
    batch: int,
    context: int,
    new: int,
) -> dict[str, Any]:
    """each: bytes of an adapter; a step reads those of its rows once."""
    adapters = [1 + 2 * (row % (ADAPTERS // 2)) for row in range(batch)]
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(1 if device.tiny else TURNS):
        for name, (runner, graphs) in ways.items():
            runner.graphs = graphs
            seconds, _ = decode(device, runner, batch, context, new, True, [] if name == "without" else adapters)
            runner.graphs = None
            found[name].append(batch * (new - 1) / seconds)
    off, on, without = (median(figures) for figures in found.values())
    moved, flops = decode_work(shape, batch, context + new / 2)
    work = (moved + len(set(adapters)) * each, flops + batch * each)
    figures = {"off_tokens_per_s": off, "on_tokens_per_s": on, "worth": on / off, "of_no_adapters": on / without}
    figures |= {"off_of_roofline": rates.share(work, batch / off), "on_of_roofline": rates.share(work, batch / on)}
    return {"what": f"LoRA in graphs, decode, batch {batch}"} | figures
