"""Stages: the sampler on the device chooses what the sampler on the CPU chooses, from the same logits and seeds; and what it costs.

The roofline is one read of the logits, for the fused kernel; torch is only compared with it.
"""

from array import array
from collections.abc import Iterator
from typing import Any

import torch

from bench.gpu import interpreter
from bench.gpu.device import Device
from bench.gpu.report import beside
from bench.gpu.roofline import Rates, beside_roofline, rates_of
from fairlead_worker.ipc.messages import Sampling, Submit
from fairlead_worker.sampling.filters import keep_sorted
from fairlead_worker.sampling.fused import FusedSampler
from fairlead_worker.sampling.sampler import choose, sample
from fairlead_worker.sampling.trial import make_fused_sampler
from fairlead_worker.scheduler.request import Request

SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 1.0},
    "hot": {"temperature": 3.0},
    "top_k": {"temperature": 0.8, "top_k": 40},
    "top_p": {"temperature": 0.9, "top_p": 0.95},
    "top_p of much": {"temperature": 5.0, "top_p": 0.99},
    "min_p": {"temperature": 1.0, "min_p": 0.05},
    "penalties": {"temperature": 1.0, "top_p": 0.9, "repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    "bias": {"temperature": 1.0, "logit_bias": ((3, 4.0), (9, -100.0)), "min_tokens": 50, "stop_token_ids": (5,)},
}
EXPLAINED = 1e-3
"""Share of choices that may differ. Exponentials of a device differ from a CPU's in the last bit, so that a number of the noise which is
as close to the border between two tokens may fall on its other side: once in a thousand draws over a flat vocabulary, else far less."""


def check(device: Device) -> Iterator[dict[str, Any]]:
    """Rows of each setting, and all of them mixed in one batch, by torch alone."""
    yield from _compared(device, None)


ROWS, BAR_MS = 256, 0.05
"""The bar of the kernel: a time for so many rows, with any setting."""


def check_fused(device: Device) -> Iterator[dict[str, Any]]:
    """The same by the fused kernel; equal logits; times of the kernel and of a step's sampling beside torch's and a read of the logits."""
    vocabulary = 3000 if device.tiny else 128_256
    fused = make_fused_sampler(device.device, vocabulary, torch.bfloat16) if device.cuda else FusedSampler(interpreter.choose_tokens)
    yield {"what": "the kernel chooses what torch chooses", "ok": fused is not None}
    if fused is None:
        return
    yield from _compared(device, fused)
    yield equal_logits(device, fused)
    rates = rates_of(device)
    for rows in (2,) if device.tiny else (64, ROWS):
        for name in ("greedy", "temperature", "top_k", "top_p", "min_p", "penalties"):
            yield timed(device, fused, name, rows, vocabulary, rates)


def _compared(device: Device, fused: FusedSampler | None) -> Iterator[dict[str, Any]]:
    vocabulary, rows, rounds = (3000, 9, 2) if device.tiny else (128_256, 64, 8 if fused is None else 4)
    for name, setting in SETTINGS.items():
        yield compare(device, name, [setting], vocabulary, rows, rounds, fused)
    yield compare(device, "all of them in one batch", list(SETTINGS.values()), vocabulary, rows, rounds, fused)


def equal_logits(device: Device, fused: FusedSampler) -> dict[str, Any]:
    """A row: how many choices among equal logits a filter would not allow, or another batch changes."""
    rows, vocabulary = 64, 3000 if device.tiny else 128_256
    logits = (torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(9)) * 8).round() / 4
    settings: list[dict[str, Any]] = [{"top_k": 1}, {"top_k": 20}, {"top_p": 1e-6}, {"top_p": 0.5}, {"top_p": 0.9, "min_p": 0.02}]
    requests = [_request(number, settings[number % len(settings)]) for number in range(rows)]
    there = logits.to(device.device)
    tokens, _ = sample(there, requests, fused=fused)
    samplings = [request.sampling for request in requests]
    left = keep_sorted(logits - logits.amax(1, keepdim=True), samplings)
    dropped = sum(bool(left[row, token] == float("-inf")) for row, token in enumerate(tokens))
    alone = [sample(there[row : row + 1], [request], fused=fused)[0][0] for row, request in enumerate(requests)]
    changed = sum(one != other for one, other in zip(tokens, alone, strict=True))
    # top_p may end one token earlier or later, where the sums of float32 and float64 round differently.
    return {"what": "equal logits", "choices": rows, "dropped": dropped, "changed": changed, "ok": dropped <= 1 and not changed}


def timed(device: Device, fused: FusedSampler, name: str, rows: int, vocabulary: int, rates: Rates) -> dict[str, Any]:
    """A row: milliseconds of the kernel, and of a step's sampling with and without it, beside those of reading its logits once.

    The logits are as flat as random ones are, which is the worst case of a top_p.
    """
    requests = [_request(number, SETTINGS[name]) for number in range(rows)]
    logits = torch.randn(rows, vocabulary, device=device.device).bfloat16()
    with_kernel, without = (
        device.seconds(lambda each=each: sample(logits, requests, fused=each))  # type: ignore[misc]  # a default
        for each in (fused, None)
    )
    kept: list[tuple[torch.Tensor, ...]] = []
    launch = fused.launch

    def record(*parts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        kept.append(parts)
        return launch(*parts)

    choose(logits, requests, fused=FusedSampler(record))
    kernel = device.kernel_seconds([lambda: launch(*kept[0])])
    row = {"what": f"{name}, {rows} rows", "ms": kernel * 1e3, "ms_with_host": with_kernel * 1e3, "ms_by_torch": without * 1e3}
    row = beside_roofline(row, rates, (logits.nbytes, 0), kernel)
    return row if rows == 64 else beside(row, "ms", most=BAR_MS)


def compare(
    device: Device,
    what: str,
    settings: list[dict[str, Any]],
    vocabulary: int,
    rows: int,
    rounds: int,
    fused: FusedSampler | None,
) -> dict[str, Any]:
    """A row: how many of the choices are equal."""
    generator = torch.Generator().manual_seed(7)
    different = 0
    for number in range(rounds):
        logits = torch.randn(rows, vocabulary, generator=generator) * 2
        logits[:, :50] += 6  # a few likely tokens, as in a model's
        requests = [_request(number * rows + row, settings[row % len(settings)]) for row in range(rows)]
        here, _ = sample(logits, requests)
        there, _ = sample(logits.to(device.device), requests, fused=fused)
        different += sum(one != other for one, other in zip(here, there, strict=True))
    total = rows * rounds
    allowed = 0 if what == "greedy" else max(1, int(total * EXPLAINED))
    return {"what": what, "choices": total, "different": different, "allowed": allowed, "ok": different <= allowed}


def _request(number: int, setting: dict[str, Any]) -> Request:
    tokens = array("I", [(number * 13 + place) % 60 for place in range(40)])
    sampling = Sampling(max_tokens=100, seed=number * 7919, **setting)
    return Request(Submit(str(number), b"", sampling, 0), tokens, 20, number)
