"""Stage: weights of fewer bits, each kind beside the same model in bfloat16: what they compute, what they take, what they are worth."""

import os
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from bench.gpu.batches import packed
from bench.gpu.device import Device, median
from bench.gpu.model import SHAPES, saved, scheduler_for, submit, weight_bytes
from bench.gpu.models.awq_checkpoint import AWQ, save_awq
from bench.gpu.models.low_bit_weights import Explicit, Narrow, by_token, held_bytes, narrow_layers, numbers, rounds, save_float8
from bench.gpu.report import beside
from bench.gpu.roofline import Rates, decode_work, prefill_work, rates_of
from bench.gpu.shared_model import Kit, recorded, release
from bench.gpu.stages.overlap import decode
from fairlead_worker.execution.cuda_graphs.decodes import GraphedDecodes
from fairlead_worker.execution.runner import ModelRunner
from fairlead_worker.ipc.messages import Sampling
from fairlead_worker.kernels.base import PackedStep
from fairlead_worker.model.formats.float8 import find_problem
from fairlead_worker.model.loader import load_model
from fairlead_worker.model.lowbit.linear import CAPABILITY

PACKAGES = ("torchao", "accelerate", "compressed_tensors")
TURNS = 3
PROMPT = 41
"""Tokens whose logits are compared: all but the last in one step, then a decode."""
SUMS = 0.05
"""Of a row's length, after all layers: in bfloat16 other orders of summation add up to 0.03 (`model.probe`)."""
LINEAR = 7
"""Linear layers of one of Llama's layers."""
SIZES = {"fp8": 0.515, "kept": 0.515, "blocks": 0.515, "int4": 0.3, "awq": 0.3}
"""At most so much of bfloat16's bytes: a byte, and a float32 for each output; half a byte, and two of 16 bits for 128 weights (0.27)."""


@dataclass(frozen=True)
class Kind:
    """`stored`: of a checkpoint, in float8 with scales of rows or of `blocks`, or in AWQ's 4 bits; else made of bfloat16's at load."""

    name: str
    quantization: str
    stored: bool = False
    blocks: bool = False


@dataclass(frozen=True)
class Sizes:
    """Of what is timed."""

    batches: tuple[int, ...]
    context: int
    new: int
    chunk: int


@dataclass(frozen=True)
class Base:
    """The model in bfloat16, and what is known of it."""

    device: Device
    shape: str
    rates: Rates
    runner: ModelRunner
    graphs: GraphedDecodes | None
    explicit: Explicit
    differs: float
    """Its logits, from those in float32."""


def measure(device: Device, kit: Kit) -> Iterator[dict[str, Any]]:
    """Each kind: its bytes; linear layers and the whole model beside an explicit computation; graphs beside eager steps; then decodes at a
    context of 2k and a chunk of 8k, in turns with bfloat16. One that fails keeps none from its turn.
    """
    if missing := [name.replace("_", "-") for name in PACKAGES if find_spec(name) is None]:
        yield {"what": "weights of fewer bits", "ok": True, "left_out": f"not installed: {', '.join(missing)}"}
        return
    sizes = Sizes((1, 16, 64), 2048, 32, 8192) if not device.tiny else Sizes((1, 4), 24, 4, 24)
    shape = "tiny" if device.tiny else "8b-short"
    yield {"what": "the shape of all rows", **{name: SHAPES[shape][name] for name in ("hidden_size", "num_hidden_layers")}}
    multiplied = device.cuda and torch.cuda.get_device_capability(device.device) >= CAPABILITY
    if not multiplied:
        yield {"what": "products of float8", "ok": True, "left_out": "no GPU from 8.9 on: weights are widened for each product"}
    kinds = [
        Kind("fp8", "fp8"),
        Kind("kept", "none" if multiplied else "fp8", stored=True),
        Kind("int4", "int4"),
        Kind(AWQ, "none", stored=True),
    ]
    if problem := find_problem(device.device) if device.cuda else "no GPU":
        yield {"what": "float8 in blocks", "ok": True, "left_out": problem}
    else:
        kinds.insert(2, Kind("blocks", "none", stored=True, blocks=True))
    if not device.cuda:
        yield {"what": "int4 and AWQ", "ok": True, "left_out": "no GPU, and their kernel is CUDA's"}
        kinds = [kind for kind in kinds if kind.name not in (AWQ, "int4")]
    torch.backends.cuda.matmul.allow_tf32 = False  # what is explicit is in float32
    pages = max(sizes.batches[-1] * -(-(sizes.context + sizes.new + 16) // 16), -(-sizes.chunk // 16)) + 64
    rates = rates_of(device)
    runner = kit.runner(shape, pages, sizes.batches[-1])
    graphs, runner.graphs = runner.graphs, None
    base = None
    try:
        with saved(device, shape) as folder, TemporaryDirectory(dir=os.environ.get("GPU_CHECK_TMP")) as made:
            explicit = Explicit(folder, device.device)
            differs = apart(said(device, runner), explicit.logits(prompt(device)))
            yield {"what": "bfloat16 beside float32, logits", "differs": differs}
            base = Base(device, shape, rates, runner, graphs, explicit, differs)
            stored = {
                kind.name: save_awq(folder, Path(made) / AWQ, device.device)
                if kind.name == AWQ
                else save_float8(folder, Path(made) / kind.name, device.device, kind.blocks)
                for kind in kinds
                if kind.stored
            }
            for kind in kinds:
                try:
                    yield from _kind(base, kind, stored.get(kind.name, folder), sizes)
                except Exception as error:  # a library's own, say of a kernel that is not for this device
                    traceback.print_exc()
                    yield {"what": kind.name, "ok": False, "said": f"{type(error).__name__}: {str(error)[-600:]}"}
                release()
    finally:
        del runner, graphs, base
        kit.drop()


def _kind(base: Base, kind: Kind, folder: Path, sizes: Sizes) -> Iterator[dict[str, Any]]:
    device = base.device
    release()
    began = time.perf_counter()
    loaded = load_model(str(folder), dtype="bfloat16", device=device.device, quantization=kind.quantization)
    row: dict[str, Any] = {"what": f"{kind.name}, loaded", "seconds": time.perf_counter() - began}
    runner = ModelRunner(loaded, base.runner.backend)
    layers = narrow_layers(loaded.model)
    share = sum(map(held_bytes, layers.values())) / weight_bytes(base.shape)[0]
    yield row | {"ok": share <= SIZES[kind.name], "of_bfloat16": share}
    yield _products(kind, layers)
    rounding, row = _whole(base, kind, runner, layers)
    yield row
    graphs = recorded(device, runner, sizes.batches[-1])
    yield from _replayed(base, kind, runner, graphs, sizes, rounding)
    ways = {"bfloat16": (base.runner, base.graphs), kind.name: (runner, graphs)}
    for batch in sizes.batches:
        yield _decodes(base, layers, ways, batch, sizes)
    yield _chunk(base, layers, ways, sizes.chunk)


@torch.inference_mode()
def _products(kind: Kind, layers: Mapping[str, Narrow]) -> dict[str, Any]:
    """A row: the linear layers of one layer beside float32 products of the same numbers, the inputs rounded as they are to be. The largest
    difference of a token over its length, and over what is allowed; and how far off the product is with inputs as they came.

    Allowed are 2**-7, as outputs and widened weights are rounded to bfloat16. Where float8 is multiplied: 2**-8, and 2**-14 for each 32
    inputs, as GPUs of 9.0 add 32 products at a time to sums of 14 bits (DeepSeek-V3, arXiv 2412.19437, 3.3.2: up to 2 % at 4,096 inputs).
    """
    drawn = torch.Generator().manual_seed(4)
    differs = of_allowed = unrounded = 0.0
    zeros = True
    for layer in list(layers.values())[:LINEAR]:
        inputs = torch.randn(8, layer.in_features, generator=drawn).to(torch.bfloat16).to(next(layer.parameters()).device)
        inputs[1] *= 100  # a token has a scale of its own
        inputs[5] = 0
        got, wide = layer(inputs).float(), numbers(layer)
        allowed = 2**-8 + layer.in_features / 32 * 2**-14 if rounds(layer) else 2**-7
        off = apart(got, (by_token(inputs, kind.blocks) if rounds(layer) else inputs.float()) @ wide.T)
        differs, of_allowed = max(differs, off), max(of_allowed, off / allowed)
        unrounded = max(unrounded, apart(got, inputs.float() @ wide.T))
        zeros = zeros and not got[5].any()  # neither numbers nor what is none
    row = {"what": f"{kind.name}, linear layers", "ok": of_allowed <= 1 and zeros, "differs": differs, "of_allowed": of_allowed}
    return row | {"differs_from_unrounded": unrounded, "zeros_stay_zeros": zeros}


def _whole(base: Base, kind: Kind, runner: ModelRunner, layers: Mapping[str, Narrow]) -> tuple[float, dict[str, Any]]:
    """How far rounding inputs moves the logits, and a row: those of a prompt and a decode beside a plain model with the same numbers, in
    float32 and with transformers' attention; inputs rounded in both.

    Allowed is what bfloat16 itself is off, a quarter more and 0.02 (as in stage `logits`), and twice of what rounding inputs does: inputs
    that differ in the last bits are rounded to this neighbour or that one, so that two computations may be as far apart as two
    independent roundings are, 2**0.5 of it (1.2 on a CPU, 8 layers of 512 inputs); the rest is for sums of 14 bits.
    """
    tokens = prompt(base.device)
    base.explicit.take(layers)
    wide = base.explicit.logits(tokens)
    rounded = any(map(rounds, layers.values()))
    want = base.explicit.logits(tokens, rounded=True, blocks=kind.blocks) if rounded else wide
    got, own = said(base.device, runner), said(base.device, base.runner)
    rounding, differs = apart(want, wide), apart(got, want)
    allowed = 1.25 * base.differs + 0.02 + 2 * rounding
    row: dict[str, Any] = {"what": f"{kind.name}, logits", "ok": differs <= allowed, "differs": differs, "allowed": allowed}
    return rounding, row | {"rounding_inputs": rounding, "differs_from_wide": apart(got, wide), "differs_from_bfloat16": apart(got, own)}


@torch.inference_mode()
def _replayed(
    base: Base, kind: Kind, runner: ModelRunner, graphs: GraphedDecodes | None, sizes: Sizes, rounding: float
) -> Iterator[dict[str, Any]]:
    """Rows: decodes in graphs beside eager ones.

    Attention plans differ where a graph is filled up, so last bits may: allowed is what that makes in bfloat16, and by rounded inputs.
    """
    yield {"what": f"{kind.name}, capturing", "ok": graphs is not None}
    if graphs is None:
        return
    allowed = SUMS + 2 * rounding
    for batch in sizes.batches:
        step = _step(base.device, batch, sizes.context)
        eager, replayed = runner.run(step), graphs.run(step)
        differs = apart(replayed, eager)
        row = {"what": f"{kind.name}, graphs beside eager, batch {batch}", "ok": differs <= allowed, "differs": differs}
        yield row | {"equal": replayed is not None and torch.equal(replayed, eager)}


def _decodes(
    base: Base, layers: Mapping[str, Narrow], ways: dict[str, tuple[ModelRunner, GraphedDecodes | None]], batch: int, sizes: Sizes
) -> dict[str, Any]:
    """A row: tokens a second, in graphs and with steps launched ahead."""

    def run(runner: ModelRunner, graphs: GraphedDecodes | None) -> float:
        runner.graphs = graphs
        try:
            return decode(base.device, runner, batch, sizes.context, sizes.new, True)[0] / (sizes.new - 1)
        finally:
            runner.graphs = None

    work = decode_work(base.shape, batch, sizes.context + sizes.new / 2)
    return _in_turns(base, layers, f"decode, batch {batch}", batch, work, ways, run)


def _chunk(
    base: Base, layers: Mapping[str, Narrow], ways: dict[str, tuple[ModelRunner, GraphedDecodes | None]], tokens: int
) -> dict[str, Any]:
    """A row: one prompt in one step."""

    def run(runner: ModelRunner, graphs: GraphedDecodes | None) -> float:
        scheduler = scheduler_for(runner, chunked_prefill_size=0, max_prefill_tokens=tokens)
        submit(scheduler, 0, range(10, 10 + tokens), Sampling(max_tokens=1, temperature=0, ignore_eos=True))
        plan = scheduler.plan()
        return base.device.seconds(lambda: runner.execute(plan), 2)

    return _in_turns(base, layers, f"a chunk of {tokens}", tokens, prefill_work(base.shape, tokens), ways, run)


def _in_turns(
    base: Base,
    layers: Mapping[str, Narrow],
    what: str,
    tokens: int,
    work: tuple[float, float],
    ways: dict[str, tuple[ModelRunner, GraphedDecodes | None]],
    run: Callable[[ModelRunner, GraphedDecodes | None], float],
) -> dict[str, Any]:
    """The median of turns that alternate, each beside its roofline, and the ratio; one turn of each where one takes long. `run`: seconds of
    a step with `tokens` and, in bfloat16, with `work`."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(1 if base.device.tiny else TURNS):
        for name, (runner, graphs) in ways.items():
            times[name].append(run(runner, graphs))
        if max(found[0] for found in times.values()) > 8 * min(found[0] for found in times.values()):
            break
    off, on = (median(found) for found in times.values())
    row = {"what": f"{list(ways)[1]}, {what}", "bfloat16_tokens_per_s": tokens / off, "tokens_per_s": tokens / on, "worth": off / on}
    shares = base.rates.share(work, off), base.rates.share(_narrow_work(base, layers, tokens, work), on)
    row |= dict(zip(("bfloat16_of_roofline", "of_roofline"), shares, strict=True))
    return beside(row, "worth", least=1.5) if what.startswith("a chunk") and "fp8" in ways else row


def _narrow_work(base: Base, layers: Mapping[str, Narrow], tokens: int, work: tuple[float, float]) -> tuple[float, float]:
    """Return bytes and FLOPs of a step with `layers` instead of bfloat16's. A FLOP in float8 takes half the time, and counts half."""
    wide, held = weight_bytes(base.shape)[0], sum(map(held_bytes, layers.values()))
    saved_flops = wide * tokens / 2 if any(map(rounds, layers.values())) else 0
    return work[0] - wide + held, work[1] - saved_flops


def prompt(device: Device) -> torch.Tensor:
    return torch.randint(10, 900, (PROMPT,), generator=torch.Generator().manual_seed(6)).to(device.device)


@torch.inference_mode()
def said(device: Device, runner: ModelRunner) -> torch.Tensor:
    """[PROMPT, vocabulary] float32, of `prompt`."""
    tokens, pages = prompt(device), range(-(-PROMPT // 16))
    logits = []
    for start, count in ((0, PROMPT - 1), (PROMPT - 1, 1)):
        step = packed([(start, count)], [pages], 16, device.device)
        sampled = torch.arange(count, device=device.device)
        logits.append(runner.run(replace(step, tokens=tokens[start : start + count], sampling=sampled)).float())
    return torch.cat(logits)


def _step(device: Device, batch: int, context: int) -> PackedStep:
    """Decodes, each on pages of its own."""
    each = -(-(context + 1) // 16)
    step = packed([(context, 1)] * batch, [range(row * each, (row + 1) * each) for row in range(batch)], 16, device.device)
    rows = torch.arange(batch, device=device.device)
    return replace(step, tokens=10 + rows, sampling=rows)


def apart(some: torch.Tensor | None, others: torch.Tensor) -> float:
    """The largest difference of a row over the other row's length; infinity where one is no number, or nothing was said."""
    if some is None:
        return float("inf")
    return _finite((some.float() - others.float()).norm(dim=1) / others.float().norm(dim=1).clamp(min=1e-30))


def _finite(values: torch.Tensor) -> float:
    return float(values.nan_to_num(float("inf")).max())
