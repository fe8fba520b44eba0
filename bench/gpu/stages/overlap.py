"""Stage: what launching steps ahead and CUDA graphs are worth, off and on in turns, and that they say the same tokens; what
`--deterministic` costs."""

import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from bench.gpu.device import Device, median
from bench.gpu.loop import Loop
from bench.gpu.model import weight_bytes
from bench.gpu.report import beside
from bench.gpu.roofline import Rates, beside_roofline, decode_work, rates_of
from bench.gpu.roofline import measure as measure_rates
from bench.gpu.shared_model import Kit
from fairlead_worker.execution.batch_invariance import NotInvariant, check_invariance, configure_torch
from fairlead_worker.execution.cuda_graphs.decodes import GraphedDecodes
from fairlead_worker.execution.runner import ModelRunner
from fairlead_worker.model.fixed_rows import fix_rows

TURNS = 3
BAR_BYTES_PER_S = 4.3e12
"""What the bar is a share of: an H200's copies (bytes read and written), as torch reaches them."""


def measure(device: Device, kit: Kit) -> Iterator[dict[str, Any]]:
    """Decodes of several batches at a context of 2k: tokens a second of each way, the median of turns that alternate, and the share of
    what memory would allow (weights and KV read once a step): this device's as measured, and the bar's. Then the plain way again under
    `--deterministic`.
    """
    sizes, context, new = ((1, 16, 64, 256), 2048, 64) if not device.tiny else ((1, 3), 24, 6)
    batches = sizes if kit.large else sizes[:-1]
    shape, plain = "tiny" if device.tiny else "8b", dict[int, float]()
    copied, sheet = measure_rates(device).bytes_per_s, rates_of(device)
    runner = kit.shared(batches[-1] * -(-(context + new + 16) // 16) + 64, batches[-1])
    graphs, runner.graphs = runner.graphs, None
    yield {"what": "capturing", "sizes": len(graphs.sizes) if graphs else 0, "seconds": kit.capture_seconds, "ok": graphs is not None}
    for batch in batches:
        row = _row(device, runner, graphs, batch, context, new, shape, copied, sheet.bytes_per_s)
        plain[batch] = row["plain_tokens_per_s"]
        yield row
    try:
        yield from _deterministic(device, runner, shape, sheet, context, new, plain)
    finally:
        restore_torch()
        del runner, graphs
        kit.drop()  # its model is no more what it was


def _row(
    device: Device,
    runner: ModelRunner,
    graphs: GraphedDecodes | None,
    batch: int,
    context: int,
    new: int,
    shape: str,
    copied: float,
    sheet: float,
) -> dict[str, Any]:
    ways = {"plain": (False, False), "overlap": (True, False)}
    if graphs is not None:
        ways |= {"graphs": (False, True), "both": (True, True)}
    rates: dict[str, list[float]] = {name: [] for name in ways}
    said: dict[str, dict[int, list[int]]] = {}
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
        row |= {f"{name}_tokens_per_s": median(found), f"{name}_of_ideal": median(found) / batch * read / copied}
    # Graphs pad batches, which may turn bfloat16's last bit; launching ahead computes the same steps.
    row |= {
        "ok": said["overlap"] == said["plain"] and said.get("both") == said.get("graphs"),
        "graphs_equal": said.get("graphs") == said["plain"],
        "best_of_roofline": max(median(found) for found in rates.values()) / batch * read / sheet,
        "best_of_bar": max(median(found) for found in rates.values()) / batch * read / BAR_BYTES_PER_S,
    }
    return beside(row, "best_of_bar", least=0.75)


def _deterministic(
    device: Device, runner: ModelRunner, shape: str, sheet: Rates, context: int, new: int, plain: dict[int, float]
) -> Iterator[dict[str, Any]]:
    """Of the same model and pages, which are so from now on."""
    configure_torch(device.device)
    fix_rows(runner.loaded.model)
    runner.backend.batch_invariant = True  # type: ignore[attr-defined]  # FlashInfer's
    try:
        check_invariance(runner)
        yield {"what": "deterministic", "kept": True}
    except NotInvariant as error:
        yield {"what": "deterministic", "kept": False, "said": str(error)}
    for batch, before in plain.items():
        rate = batch * (new - 1) / decode(device, runner, batch, context, new, overlap=False)[0]
        row = {"what": f"decode, batch {batch}, deterministic", "tokens_per_s": rate, "of_plain": rate / before}
        yield beside_roofline(row, sheet, decode_work(shape, batch, context + new / 2), batch / rate)


def restore_torch() -> None:
    """torch's switches as they were before `configure_torch`, for the next stages."""
    torch.use_deterministic_algorithms(False)
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = True
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = True


def decode(
    device: Device, runner: ModelRunner, batch: int, context: int, new: int, overlap: bool, adapters: Sequence[int] = ()
) -> tuple[float, dict[int, list[int]]]:
    """Seconds from the first tokens to the last, and the tokens. Prompts are not computed: each row reads pages of its own, which hold
    random numbers, for pages that rows share would be read from the device's cache. `adapters`: of each row; empty: none."""
    loop = Loop(runner, overlap, max_num_seqs=batch, chunked_prefill_size=0, max_prefill_tokens=batch * context, dedupe_tokens=0)
    drawn = torch.Generator().manual_seed(2)
    for number in range(batch):
        loop.submit(number, torch.randint(10, 900, (context,), generator=drawn).tolist(), new, adapters[number] if adapters else 0)
    loop.pretend()
    device.wait()
    began = time.perf_counter()
    loop.run()
    return time.perf_counter() - began, loop.tokens
