"""When the launches of a step with a prompt take longer than its kernels, on an H200, predicted as in `predicted_steps`.

For chunks of several sizes: launches and times without graphs, and as piecewise CUDA graphs. Nothing here is measured. `--write` puts the
table into docs/benchmarks/gpu-model.md.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import asdict

import torch

from bench.common.report import make_parser, write_report
from bench.gpu.fake.worker import fake_worker
from bench.gpu.predicted_steps import (
    DEPTHS,
    LIMIT,
    PAGE,
    PAGE_FILE,
    SHAPES,
    Prediction,
    continue_to,
    load,
    predict,
    prefill_plan,
    record_step,
)
from fairlead_worker.execution.graphs import graphs_for
from fairlead_worker.execution.piecewise import SIZES, PieceSizes, record_pieces
from fairlead_worker.execution.runner import ModelRunner, make_runner

BEGIN, END = "<!-- begin of chunks -->", "<!-- end of chunks -->"
CHUNKS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)


def predictions(name: str, chunks: Sequence[int] = CHUNKS) -> list[tuple[Prediction, Prediction | None]]:
    """Return each chunk of one model, without graphs and in pieces; None: there are none of that size."""
    layers = int(SHAPES[name].settings["num_hidden_layers"])
    shallow, deep = (list(_predict(name, depth, chunks)) for depth in DEPTHS)
    return [
        (continue_to(layers, plain, deeper), None if pieces is None or other is None else continue_to(layers, pieces, other))
        for (plain, pieces), (deeper, other) in zip(shallow, deep, strict=True)
    ]


def _predict(name: str, layers: int, chunks: Sequence[int]) -> Iterator[tuple[Prediction, Prediction | None]]:
    shape = SHAPES[name]
    with fake_worker() as gpu:
        runner = make_runner(load(gpu, shape, layers), page_size=PAGE, kv_pages=-(-max(chunks) // PAGE))
        for chunk in chunks:
            runner.graphs = runner.pieces = None
            plain = predict(name, f"chunk {chunk:,}", record_step(gpu, runner, prefill_plan(chunk)), shape.ranks)
            if shape.ranks > 1 or chunk not in SIZES:
                yield plain, None
                continue
            _record_pieces(runner, chunk)
            yield plain, predict(name, plain.step, record_step(gpu, runner, prefill_plan(chunk)), shape.ranks)


def _record_pieces(runner: ModelRunner, size: int) -> None:
    """Record pieces of one size."""
    runner.graphs = graphs_for(runner.forward, runner.backend, 1, LIMIT)
    assert runner.graphs is not None, "the models here have graphs"
    runner.graphs.capture()
    runner.pieces = record_pieces(runner.graphs, runner.forward, runner.backend, LIMIT, PieceSizes(size, [size]))
    assert runner.pieces is not None, "and pieces"


def table(found: Sequence[tuple[Prediction, Prediction | None]]) -> str:
    """Return the predictions as a table in Markdown."""
    head = "| Model | Chunk | Device, ms | Launches | Host, ms | Launches in pieces | Host, ms | **Step, ms** | In pieces, ms |"
    lines = [head, f"|{' --- |'}{' ---: |' * 8}"]
    for plain, pieces in found:
        bound = f"{plain.device_ms:.2f} | {plain.launches:,} | {plain.host_ms:.2f}"
        inner = "– | – | " if pieces is None else f"{pieces.launches:,} | {pieces.host_ms:.2f} | "
        helps = pieces is not None and plain.host_ms > plain.device_ms
        last = f"**{plain.step_ms:.2f}** | {f'{pieces.step_ms:.2f}' if helps and pieces is not None else 'not recorded'}"
        lines.append(f"| {plain.model} | {plain.step.partition(' ')[2]} | {bound} | {inner}{last} |")
    return "\n".join(lines)


def main() -> None:
    parser = make_parser(__name__, __doc__)
    parser.add_argument("--models", nargs="*", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--write", action="store_true", help=f"put the table into {PAGE_FILE.name}")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    found = [pair for name in options.models for pair in predictions(name)]
    print(table(found))
    if options.write:
        before, _, rest = PAGE_FILE.read_text(encoding="utf-8").partition(BEGIN)
        PAGE_FILE.write_text(f"{before}{BEGIN}\n\n{table(found)}\n\n{END}{rest.partition(END)[2]}", encoding="utf-8")
    rows = [{"plain": asdict(plain), "pieces": None if pieces is None else asdict(pieces)} for plain, pieces in found]
    write_report(__name__, options, rows)


if __name__ == "__main__":
    main()
