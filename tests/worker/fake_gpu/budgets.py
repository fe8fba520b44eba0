"""Budgets of kernels, launches, bytes, FLOPs and waits on a fake GPU: `python -m tests.worker.fake_gpu.budgets` measures and writes them.

A layer's share is the difference between models of two depths, so what a step needs once (embedding, head, sampling) is apart from it.
"""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.worker.execution.planner import Planner, make_request
from tests.worker.fake_gpu.device.gpu import FakeGpu
from tests.worker.fake_gpu.device.record import Record, count_names
from tests.worker.fake_gpu.device.worker import FakeGroup, fake_worker
from tests.worker.fake_gpu.runs import GREEDY, PAGE, load

from fairlead_worker.execution.runner import ModelRunner
from fairlead_worker.execution.runner_builder import RunnerBuilder
from fairlead_worker.scheduler.plan import StepPlan

FILE = Path(__file__).parent / "budgets.json"
ROWS, CONTEXT, CHUNK = 4, 100, 64
SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1}
MOE = SIZES | {"moe_intermediate_size": 128}
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama bf16": ("llama", "none", SIZES),
    "qwen2 bf16": ("qwen2", "none", SIZES),
    "qwen3 bf16": ("qwen3", "none", SIZES),
    "gemma2 bf16": ("gemma2", "none", SIZES | {"num_hidden_layers": 2}),
    "gemma3 bf16": ("gemma3", "none", SIZES | {"num_hidden_layers": 3}),
    "phi3 bf16": ("phi3", "none", SIZES),
    "gpt_neox bf16": ("gpt_neox", "none", SIZES),
    "mixtral bf16": ("mixtral", "none", SIZES),
    "qwen3_moe bf16": ("qwen3_moe", "none", MOE),
    "deepseek_v3 bf16": ("deepseek_v3", "none", {}),
    "qwen3_moe fp8 in blocks": ("qwen3_moe", "float8 in blocks", MOE),
    "qwen3_moe fp8 experts, before 8.9": ("qwen3_moe", "float8 experts, widened", MOE),
    "qwen3_moe MXFP4 experts": ("qwen3_moe", "MXFP4 experts", MOE),
    "llama fp8": ("llama", "fp8", SIZES),
    "llama fp8 in blocks": ("llama", "float8 in blocks", SIZES),
    "llama int4": ("llama", "int4", SIZES),
    "llama int4 in groups": ("llama", "int4 in groups", SIZES),
    "llama int4 in groups, 2 ranks": ("llama", "int4 in groups", SIZES),
    "llama bf16, 2 ranks": ("llama", "none", SIZES),
    "llama bf16, fp8 KV": ("llama", "none", SIZES | {"kv_scale": 1.0}),
}
"""Name -> (family, quantization, settings)."""
STEPS = ("decode", "prefill")
MIXED = "llama bf16"
"""The case that also has a step of decodes beside a chunk."""
PIECES = {"llama bf16": ("prefill", "mixed"), "qwen3_moe bf16": ("prefill",)}
"""Steps that are also run from piecewise CUDA graphs, by case."""
PIECEWISE = " in pieces"
"""The end of the name of such a step."""


@dataclass
class Budget:
    """What a layer, or a step besides its layers, may use."""

    bytes: float = 0
    flops: float = 0
    waits: float = 0
    launches: float = 0
    """Calls of the driver without CUDA graphs; kernels inside of a graph cost none."""
    kernels: dict[str, float] = field(default_factory=dict)


def measure(gpu: FakeGpu, case: str, only: str = "") -> dict[str, dict[str, Budget]]:
    """Return step -> {"layer", "step"} -> what it uses. `only`: one step instead of all."""
    family, quantization, settings = CASES[case]
    depth = settings.get("num_hidden_layers", 2)
    steps = (only,) if only else (*STEPS, *["mixed"] * (case == MIXED), *(step + PIECEWISE for step in PIECES.get(case, ())))
    shallow, deep = (
        run(gpu, family, quantization, settings | {"num_hidden_layers": layers}, "ranks" in case, steps) for layers in (depth, 2 * depth)
    )
    return {step: _divide(shallow[step], deep[step], depth) for step in steps}


def run(gpu: FakeGpu, family: str, quantization: str, settings: dict[str, Any], sharded: bool, steps: Sequence[str]) -> dict[str, Record]:
    """Return what each of `steps` records: decodes, a chunk of a prompt, or both; the latter two also in pieces."""
    group = FakeGroup(gpu, 0, 2) if sharded else None
    loaded = load(family, group, quantization, **settings)
    runner = RunnerBuilder(loaded=loaded, page_size=PAGE, kv_pages=64).build()
    made = {step: record(gpu, runner, step) for step in steps if not step.endswith(PIECEWISE)}
    if len(made) < len(steps):
        runner = RunnerBuilder(loaded=loaded, page_size=PAGE, kv_pages=64, graph_rows=1, piece_tokens=128).build()
    return made | {step: record(gpu, runner, step) for step in steps if step.endswith(PIECEWISE)}


def record(gpu: FakeGpu, runner: ModelRunner, step: str) -> Record:
    """Return what one step records, after the same step: the first one has no earlier plan to wait for."""
    step = step.removesuffix(PIECEWISE)
    requests = [make_request(str(number), [2] * CONTEXT, GREEDY) for number in range(ROWS if step != "prefill" else 0)]
    for request in requests:
        request.computed = CONTEXT - 1
    if step != "decode":
        requests.append(make_request("prompt", [2] * CHUNK, GREEDY))
    plan: StepPlan = Planner(requests, 64, PAGE).plan()
    runner.execute(plan)
    gpu.record = Record()
    runner.execute(plan)
    made, gpu.record = gpu.record, Record()
    return made


def _divide(shallow: Record, deep: Record, layers: int) -> dict[str, Budget]:
    few, many = _budget(shallow), _budget(deep)
    layer, step = Budget(), Budget()
    for name in ("bytes", "flops", "waits", "launches"):
        per_layer = (getattr(many, name) - getattr(few, name)) / layers
        setattr(layer, name, round(per_layer, 2))
        setattr(step, name, round(getattr(few, name) - layers * per_layer, 2))
    for name in sorted(few.kernels.keys() | many.kernels.keys()):
        per_layer = (many.kernels.get(name, 0) - few.kernels.get(name, 0)) / layers
        rest = few.kernels.get(name, 0) - layers * per_layer
        layer.kernels |= {name: round(per_layer, 2)} if per_layer else {}
        step.kernels |= {name: round(rest, 2)} if rest else {}
    return {"layer": layer, "step": step}


def _budget(made: Record) -> Budget:
    totals = made.totals()
    names: Counter[str] = count_names(made.kernels)
    return Budget(totals["bytes"], totals["flops"], totals["waits"], totals["launches"], dict(names))


def read() -> dict[str, dict[str, dict[str, Budget]]]:
    """Return the budgets of the file: case -> step -> {"layer", "step"}."""
    stored = json.loads(FILE.read_text())
    return {
        case: {step: {part: Budget(**numbers) for part, numbers in parts.items()} for step, parts in steps.items()}
        for case, steps in stored.items()
    }


def exceeded(used: Budget, budget: Budget) -> list[str]:
    """Return what is over the budget, operations by name first."""
    found = [
        f"{name}: {count:g} kernels, {budget.kernels.get(name, 0):g} allowed"
        for name, count in used.kernels.items()
        if count > budget.kernels.get(name, 0)
    ]
    for name in ("launches", "waits", "flops", "bytes"):
        value, most = getattr(used, name), getattr(budget, name)
        if value > most:
            found.append(f"{name}: {value:g}, {most:g} allowed")
    return found


def main() -> None:
    measured = {}
    for case in CASES:
        with fake_worker() as gpu:
            steps = measure(gpu, case)
        measured[case] = {step: {part: asdict(budget) for part, budget in parts.items()} for step, parts in steps.items()}
        print(case, {step: sum(parts["layer"]["kernels"].values()) for step, parts in measured[case].items()}, flush=True)
    FILE.write_text(json.dumps(measured, indent=1) + "\n")


if __name__ == "__main__":
    main()
