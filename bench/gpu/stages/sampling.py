"""Stage: the sampler on the device chooses what the sampler on the CPU chooses, from the same logits and seeds."""

import random
from array import array
from collections.abc import Iterator
from typing import Any

import torch

from bench.gpu.device import Device
from fairlead_worker.ipc.messages import Sampling
from fairlead_worker.sampling.noise import uniform, uniform_tensor
from fairlead_worker.sampling.sampler import sample
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
    """The noise bit for bit; then rows of each setting, and all of them mixed in one batch."""
    draw = random.Random(5)
    seeds = [draw.randrange(-(2**63), 2**63) for _ in range(50_000)]
    positions = [draw.randrange(2**31) for _ in seeds]
    made = uniform_tensor(torch.tensor(seeds).to(device.device), torch.tensor(positions).to(device.device)).cpu()
    equal = torch.equal(made, torch.from_numpy(uniform(seeds, positions)))
    yield {"what": "noise, bit for bit", "numbers": len(seeds), "ok": equal}
    vocabulary, rows, rounds = (3000, 9, 2) if device.tiny else (128_256, 64, 8)
    for name, setting in SETTINGS.items():
        yield compare(device, name, [setting], vocabulary, rows, rounds)
    yield compare(device, "all of them in one batch", list(SETTINGS.values()), vocabulary, rows, rounds)


def compare(device: Device, what: str, settings: list[dict[str, Any]], vocabulary: int, rows: int, rounds: int) -> dict[str, Any]:
    """A row: how many of the choices are equal."""
    generator = torch.Generator().manual_seed(7)
    different = 0
    for number in range(rounds):
        logits = torch.randn(rows, vocabulary, generator=generator) * 2
        logits[:, :50] += 6  # a few likely tokens, as in a model's
        requests = [_request(number * rows + row, settings[row % len(settings)]) for row in range(rows)]
        here, _ = sample(logits, requests)
        there, _ = sample(logits.to(device.device), requests)
        different += sum(one != other for one, other in zip(here, there, strict=True))
    total = rows * rounds
    allowed = 0 if what == "greedy" else max(1, int(total * EXPLAINED))
    return {"what": what, "choices": total, "different": different, "allowed": allowed, "ok": different <= allowed}


def _request(number: int, setting: dict[str, Any]) -> Request:
    tokens = array("I", [(number * 13 + place) % 60 for place in range(40)])
    return Request(str(number), tokens, 20, Sampling(max_tokens=100, seed=number * 7919, **setting), 0, number)
