"""Prompts whose launches take longer than their kernels, on an H200, predicted as in `predicted_steps`.

For each model: launches without graphs and as piecewise CUDA graphs, the device's time for chunks of the sizes that graphs may have, and
the largest of them that waits for its launches. Nothing here is measured. `--write` puts the table into docs/benchmarks/gpu-launches.md.
"""

import logging
from collections.abc import Sequence
from dataclasses import asdict

import torch

from bench.common.report import ROOT, make_parser, write_report
from bench.gpu.fake.worker import fake_worker
from bench.gpu.predicted_steps import (
    DEPTHS,
    LIMIT,
    PAGE,
    SHAPES,
    Prediction,
    continue_to,
    load,
    predict,
    prefill_plan,
    record_step,
)
from fairlead_worker.execution.cuda_graphs.decodes import graphs_for
from fairlead_worker.execution.cuda_graphs.piecewise import SIZES, PieceSizes, record_pieces
from fairlead_worker.execution.runner import ModelRunner, make_runner

PAGE_FILE = ROOT / "docs" / "benchmarks" / "gpu-launches.md"
BEGIN, END = "<!-- begin of chunks -->", "<!-- end of chunks -->"
SHOWN = (64, 256, 512, 1024, 2048)


def predictions(name: str, sizes: Sequence[int] = SIZES) -> tuple[list[Prediction], Prediction | None]:
    """Return chunks of `sizes` of one model without graphs, and the first of them in pieces; None: the worker has none with ranks."""
    layers = int(SHAPES[name].settings["num_hidden_layers"])
    (shallow, few), (deep, many) = (_predict(name, depth, sizes) for depth in DEPTHS)
    plain = [continue_to(layers, *pair) for pair in zip(shallow, deep, strict=True)]
    return plain, None if few is None or many is None else continue_to(layers, few, many)


def _predict(name: str, layers: int, sizes: Sequence[int]) -> tuple[list[Prediction], Prediction | None]:
    shape = SHAPES[name]
    with fake_worker() as gpu:
        runner = make_runner(load(gpu, shape, layers), page_size=PAGE, kv_pages=-(-max(sizes) // PAGE))
        plain = [predict(name, f"chunk {size:,}", record_step(gpu, runner, prefill_plan(size)), shape.ranks) for size in sizes]
        if shape.ranks > 1:
            return plain, None
        _record_pieces(runner, sizes[0])
        return plain, predict(name, plain[0].step, record_step(gpu, runner, prefill_plan(sizes[0])), shape.ranks)


def _record_pieces(runner: ModelRunner, size: int) -> None:
    """Record pieces of one size."""
    runner.graphs = graphs_for(runner.forward, runner.backend, 1, LIMIT)
    assert runner.graphs is not None, "the models here have graphs"
    runner.graphs.capture()
    runner.pieces = record_pieces(runner.graphs, runner.forward, runner.backend, LIMIT, PieceSizes(size, [size]))
    assert runner.pieces is not None, "and pieces"


def row(plain: Sequence[Prediction], pieces: Prediction | None) -> str:
    """Return one model's row of the table."""
    waits = [int(one.step.partition(" ")[2].replace(",", "")) for one in plain if one.host_ms > one.device_ms]
    shown = {int(one.step.partition(" ")[2].replace(",", "")): f"{one.device_ms:.1f}" for one in plain}
    times = ", ".join(shown[size] for size in SHOWN if size in shown)
    inner = "none with TP" if pieces is None else f"{pieces.launches:,}: {pieces.host_ms:.1f}"
    return f"| {plain[0].model} | {plain[0].launches:,}: {plain[0].host_ms:.1f} | {inner} | {times} | {max(waits, default=0):,} |"


def main() -> None:
    parser = make_parser(__name__, __doc__)
    parser.add_argument("--models", nargs="*", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--write", action="store_true", help=f"put the table into {PAGE_FILE.name}")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    found = [predictions(name) for name in options.models]
    sizes = ", ".join(f"{size:,}" for size in SHOWN)
    head = f"| Model | Launches: ms | In pieces: ms | Device, ms, at {sizes} | Launches are the limit up to |"
    table = "\n".join((head, f"|{' --- |' * 4} ---: |", *(row(*one) for one in found)))
    print(table)
    if options.write:
        before, _, rest = PAGE_FILE.read_text(encoding="utf-8").partition(BEGIN)
        PAGE_FILE.write_text(f"{before}{BEGIN}\n\n{table}\n\n{END}{rest.partition(END)[2]}", encoding="utf-8")
    rows = [{"plain": [asdict(one) for one in plain], "pieces": None if pieces is None else asdict(pieces)} for plain, pieces in found]
    write_report(__name__, options, rows)


if __name__ == "__main__":
    main()
