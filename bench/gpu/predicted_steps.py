"""Step times on an H200 or H100, predicted: the worker's steps run on a fake GPU, and kernels are counted.

The real scheduler's plans, runner, fusions, attention backend and CUDA graphs run for the published shapes of four models, without weights.
Launches, kernels, bytes and FLOPs are counted for two depths, and continued to the whole model. The times are computed from them with the
constants below, some of which are shares that an H100 reached.
`--write` puts the table of an H200 into docs/benchmarks/gpu-model.md.
"""

import logging
from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from tests.worker.fake_gpu.device.gpu import FakeGpu
from tests.worker.fake_gpu.device.record import Kernel, Record
from tests.worker.fake_gpu.device.worker import FakeGroup, fake_worker, make_model
from transformers import AutoConfig, PreTrainedConfig

from bench.common.report import ROOT, make_parser, write_report
from fairlead_worker.execution.cuda_graphs.decodes import graphs_for
from fairlead_worker.execution.runner import ModelRunner
from fairlead_worker.execution.runner_builder import RunnerBuilder
from fairlead_worker.ipc.messages import Sampling, Submit
from fairlead_worker.model.fused.sums import group_of
from fairlead_worker.model.loader import LoadedModel
from fairlead_worker.scheduler.plan import Row, StepPlan
from fairlead_worker.scheduler.request import Request

PAGE_FILE = ROOT / "docs" / "benchmarks" / "gpu-model.md"
BEGIN, END = "<!-- begin of generated tables -->", "<!-- end of generated tables -->"
PAGE, LIMIT = 16, 16_384
DEPTHS = (1, 2)
CONTEXT, PROMPT = 2048, 8192
BATCHES = (1, 16, 64, 256)


@dataclass(frozen=True)
class Hardware:
    """What a device can do."""

    bytes_per_second: float
    flops_per_second: dict[str, float]
    cache_bytes_per_second: float
    """Assumed bandwidth of the L2 cache."""
    link_bytes_per_second: float
    """Of one device to the others, in one direction."""
    reached_bytes: float
    """Share of the memory bandwidth that a kernel reaches."""
    reached_product_bytes: float
    """The same for a product."""
    reached_flops: float
    """Share of the FLOP/s that a product reaches."""
    reached_attention: float
    """The same for the attention of prompts."""
    kernel_seconds: float
    """Shortest time of a kernel, with the gap to the next one."""
    sum_seconds: float
    """Assumed time of the shortest sum over ranks by NCCL."""
    push_seconds: float
    """Assumed time of the shortest sum over ranks with a norm, in which each rank writes to all others."""
    instructions_per_second: float
    """Of all threads: 132 multiprocessors start 128 instructions a clock."""
    launch_seconds: float
    """Assumed time of the host for one launch from Python, with the code of transformers and torch around it."""


H200 = Hardware(
    bytes_per_second=4.8e12,
    flops_per_second={"bfloat16": 989e12, "float16": 989e12, "float8_e4m3fn": 1979e12, "int4": 989e12, "float32": 67e12},
    cache_bytes_per_second=5.5e12,
    link_bytes_per_second=450e9,
    reached_bytes=0.87,
    reached_product_bytes=0.77,
    reached_flops=0.76,
    reached_attention=0.29,
    kernel_seconds=3e-6,
    sum_seconds=10e-6,
    push_seconds=7e-6,
    instructions_per_second=132 * 128 * 1.755e9,
    launch_seconds=25e-6,
)
"""Memory, FLOP/s and link are NVIDIA's data sheet of the H200 SXM (dense FLOP/s; 900 GB/s of NVLink in both directions together).

What is reached was measured on an H100 on 2026-11-26 (docs/benchmarks/gpu-results.md): a copy 2.91 TB/s, the products of 64 decodes 2.58, a
large product 750 TFLOP/s, the attention of a chunk 29 % of its roofline, and small kernels 2 to 4.7 µs. The other times are assumed.
"""
HARDWARE = {"H200": H200, "H100": replace(H200, bytes_per_second=3.35e12)}
"""By NVIDIA's data sheets the H100 SXM differs in its memory only."""
INT4_CACHE = 9 / 64
"""Bytes of the L2 cache for a FLOP of torch's int4 kernel (`lowbit.int4.ROWS`): 4.5 bytes of a weight for 16 rows, which are 32 FLOPs."""
SAMPLING = (11.8, 24.9)
"""Instructions for each logit in the two passes of `sampling.kernel`, in its machine code for sm_90a without edits and masks."""


@dataclass(frozen=True)
class Shape:
    """A model's published config, and how it is served."""

    kind: str
    settings: dict[str, Any]
    ranks: int = 1
    quantization: str = "none"

    def config(self, layers: int = 0) -> PreTrainedConfig:
        """Return the config; `layers`: another depth than the published one."""
        common = {"max_position_embeddings": LIMIT, "eos_token_id": None, "bos_token_id": None, "pad_token_id": None}
        return AutoConfig.for_model(self.kind, **(common | self.settings | ({"num_hidden_layers": layers} if layers else {})))


def _llama(hidden: int, inner: int, layers: int, heads: int, tied: bool = False) -> dict[str, Any]:
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": heads}
    return sizes | {"num_key_value_heads": 8, "vocab_size": 128_256, "tie_word_embeddings": tied}


_QWEN3_30B = {
    "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 48, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True, "vocab_size": 151_936,
    "tie_word_embeddings": False,
}  # fmt: skip
SHAPES = {
    "Llama 3.2 1B": Shape("llama", _llama(2048, 8192, 16, 32, tied=True)),
    "Llama 3.1 8B": Shape("llama", _llama(4096, 14_336, 32, 32)),
    "Llama 3.1 8B, fp8": Shape("llama", _llama(4096, 14_336, 32, 32), quantization="fp8"),
    "Llama 3.1 8B, AWQ": Shape("llama", _llama(4096, 14_336, 32, 32), quantization="int4 in groups"),
    "Llama 3.1 70B, TP 4": Shape("llama", _llama(8192, 28_672, 80, 64), ranks=4),
    "Qwen3 30B-A3B": Shape("qwen3_moe", _QWEN3_30B),
}


@dataclass(frozen=True)
class Prediction:
    """One step of one rank. Times in milliseconds."""

    model: str
    step: str
    launches: int
    """Of the host, with CUDA graphs where the worker has them."""
    kernels: int
    gigabytes: float
    teraflops: float
    """10^12 FLOPs."""
    bound_ms: float
    """All bytes at the memory bandwidth or all FLOPs at the peak, whichever is longer."""
    device_ms: float
    host_ms: float

    @property
    def step_ms(self) -> float:
        """The longer of device and host: launches run ahead of the device."""
        return max(self.device_ms, self.host_ms)


def kernel_seconds(kernel: Kernel, hardware: Hardware, ranks: int) -> float:
    """Return the predicted time of one kernel."""
    if kernel.name in ("all_reduce", "all_gather"):  # a ring: each rank sends its part to the others
        sent = kernel.bytes / 2 * 2 * (ranks - 1) / ranks
        return max(hardware.sum_seconds, sent / (hardware.link_bytes_per_second * hardware.reached_bytes))
    if kernel.name == "flashinfer.allreduce_norm":  # each rank sends all of its part to each other one
        sent = kernel.bytes / 4 * (ranks - 1)
        return max(hardware.push_seconds, sent / (hardware.link_bytes_per_second * hardware.reached_bytes))
    attends = kernel.name.startswith("flashinfer.")
    reached_bytes = hardware.reached_product_bytes if kernel.dtype and not attends else hardware.reached_bytes
    moving = kernel.bytes / (hardware.bytes_per_second * reached_bytes)
    peak = hardware.flops_per_second.get(kernel.dtype or "bfloat16", hardware.flops_per_second["bfloat16"])
    cached = kernel.flops * INT4_CACHE / hardware.cache_bytes_per_second if kernel.dtype == "int4" else 0.0
    reached = hardware.reached_attention if kernel.name.startswith("flashinfer.prefill") else hardware.reached_flops
    return max(hardware.kernel_seconds, moving, cached, kernel.flops / (peak * reached))


def sampling_seconds(rows: int, vocabulary: int, passes: int, hardware: Hardware = H200) -> float:
    """Return the predicted time of the sampling kernel. passes: over logits in bfloat16, 1 without a filter, else at most 2.

    A pass reads the logits from memory or starts its instructions, whichever takes longer. No pass is taken to be in the L2 cache.
    """
    moving = 2 * rows * vocabulary / (hardware.bytes_per_second * hardware.reached_bytes)
    each = (max(moving, rows * vocabulary * count / hardware.instructions_per_second) for count in SAMPLING[:passes])
    return hardware.kernel_seconds + sum(each)


def predict(model: str, step: str, record: Record, ranks: int, hardware: Hardware = H200) -> Prediction:
    """Return the prediction of a recorded step."""
    totals = record.totals()
    computing = sum(kernel.flops / hardware.flops_per_second.get(kernel.dtype or "bfloat16", 989e12) for kernel in record.kernels)
    return Prediction(
        model,
        step,
        totals["launches"],
        totals["kernels"],
        totals["bytes"] / 1e9,
        totals["flops"] / 1e12,
        1000 * max(totals["bytes"] / hardware.bytes_per_second, computing),
        1000 * sum(kernel_seconds(kernel, hardware, ranks) for kernel in record.kernels),
        1000 * totals["launches"] * hardware.launch_seconds,
    )


def load(gpu: FakeGpu, shape: Shape, layers: int = 0) -> LoadedModel:
    group = FakeGroup(gpu, 0, shape.ranks) if shape.ranks > 1 else None
    return make_model(shape.config(layers), group, LIMIT, shape.quantization)


def decode_plan(batch: int, context: int) -> StepPlan:
    """Return a step of `batch` greedy decodes at the end of `context` tokens each."""
    rows = [_row(number, context - 1, 1, context) for number in range(batch)]
    return StepPlan(rows, decodes=batch, samples=batch)


def prefill_plan(tokens: int) -> StepPlan:
    """Return a step that computes a prompt of `tokens` in one chunk."""
    return StepPlan([_row(0, 0, tokens, tokens)], prefill_tokens=tokens, samples=1)


def _row(number: int, start: int, count: int, length: int) -> Row:
    pages = -(-length // PAGE)
    request = Request(Submit(str(number), b"", Sampling(max_tokens=1, temperature=0), 0), array("I", bytes(4 * length)), length, number)
    return Row(request, start, count, array("i", range(number * pages, (number + 1) * pages)), True)


def record_step(gpu: FakeGpu, runner: ModelRunner, plan: StepPlan, graph_rows: int = 0) -> Record:
    """Return what a step records, the second time. `graph_rows`: of its CUDA graph; 0: none."""
    if graph_rows:
        graphs = graphs_for(runner.forward, runner.backend, graph_rows, LIMIT, group=group_of(runner.loaded.model))
        assert graphs is not None, "the models here have graphs"
        graphs.sizes = [graph_rows]
        graphs.capture()
        runner.graphs = graphs
    runner.execute(plan)
    gpu.record = Record()
    runner.execute(plan)
    made, gpu.record = gpu.record, Record()
    return made


def predictions(
    name: str, batches: Sequence[int] = BATCHES, prompts: Sequence[int] = (PROMPT,), hardware: Hardware = H200
) -> list[Prediction]:
    """Return the predictions of one model. All of its layers are equal, so two depths give those of any other."""
    shallow, deep = (_predictions(name, layers, batches, prompts, hardware) for layers in DEPTHS)
    layers = int(SHAPES[name].settings["num_hidden_layers"])
    return [continue_to(layers, *pair) for pair in zip(shallow, deep, strict=True)]


def continue_to(layers: int, shallow: Prediction, deep: Prediction) -> Prediction:
    """Return the prediction for `layers`, from those of DEPTHS. Every count and time grows by the same with each layer."""
    steps = (layers - DEPTHS[0]) / (DEPTHS[1] - DEPTHS[0])
    first, second = asdict(shallow), asdict(deep)
    found = {name: first[name] + steps * (second[name] - first[name]) for name in first if name not in ("model", "step")}
    whole = {name: round(found[name]) for name in ("launches", "kernels")}
    return Prediction(shallow.model, shallow.step, **(found | whole))


def _predictions(name: str, layers: int, batches: Sequence[int], prompts: Sequence[int], hardware: Hardware) -> list[Prediction]:
    shape, found = SHAPES[name], list[Prediction]()
    with fake_worker() as gpu:
        runner = RunnerBuilder(loaded=load(gpu, shape, layers), page_size=PAGE, kv_pages=max(*batches, 4) * CONTEXT // PAGE).build()
        for prompt in prompts:
            found.append(predict(name, f"prefill {prompt:,}", record_step(gpu, runner, prefill_plan(prompt)), shape.ranks, hardware))
        for batch in batches:
            made = record_step(gpu, runner, decode_plan(batch, CONTEXT), batch)
            found.append(predict(name, f"decode {batch}", made, shape.ranks, hardware))
    return found


def table(found: Sequence[Prediction]) -> str:
    """Return the predictions as a table in Markdown."""
    head = "| Model | Step | Launches | Kernels | GB | TFLOP | Bound, ms | Device, ms | Host, ms | **Step, ms** | Tokens/s |"
    lines = [head, f"|{' --- |' * 2}{' ---: |' * 9}"]
    for one in found:
        kind, _, count = one.step.partition(" ")
        tokens = int(count.replace(",", "")) / one.step_ms * 1000
        numbers = f"{one.launches:,} | {one.kernels:,} | {one.gigabytes:.2f} | {one.teraflops:.3g}"
        times = f"{one.bound_ms:.2f} | {one.device_ms:.2f} | {one.host_ms:.2f} | **{one.step_ms:.2f}** | {tokens:,.0f}"
        lines.append(f"| {one.model} | {kind} {count} | {numbers} | {times} |")
    return "\n".join(lines)


def main() -> None:
    parser = make_parser(__name__, __doc__)
    parser.add_argument("--models", nargs="*", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--gpu", choices=list(HARDWARE), default="H200")
    parser.add_argument("--prompts", nargs="*", type=int, default=[PROMPT], metavar="TOKENS", help="prompts to compute, each in one chunk")
    parser.add_argument("--write", action="store_true", help=f"put the table into {PAGE_FILE.relative_to(ROOT)}")
    options = parser.parse_args()
    if options.write and (options.gpu != "H200" or options.prompts != [PROMPT]):
        parser.error("--write is for the table of the page: leave out --gpu and --prompts")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    found = [one for name in options.models for one in predictions(name, BATCHES, options.prompts, HARDWARE[options.gpu])]
    print(table(found))
    if options.write:
        before, _, rest = PAGE_FILE.read_text(encoding="utf-8").partition(BEGIN)
        PAGE_FILE.write_text(f"{before}{BEGIN}\n\n{table(found)}\n\n{END}{rest.partition(END)[2]}", encoding="utf-8")
    write_report(__name__, options, [asdict(one) | {"step_ms": one.step_ms} for one in found])


if __name__ == "__main__":
    main()
