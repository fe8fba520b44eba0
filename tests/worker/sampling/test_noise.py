"""The noise of a device equals the noise of the host, bit for bit: the same integer operations in torch."""

import random

import torch

from fairlead_worker.sampling.noise import uniform, uniform_on, uniform_tensor


def test_torch_makes_the_same_numbers() -> None:
    draw = random.Random(1)
    edges = [0, 1, -1, 2**63 - 1, 2**63, -(2**63), 2**64 - 1, 2**64, -(2**64) - 5]
    seeds = edges + [draw.randrange(-(2**70), 2**70) for _ in range(20_000)]
    positions = [draw.randrange(0, 2**31) for _ in seeds]
    wanted = torch.from_numpy(uniform(seeds, positions))
    signed = torch.tensor([((seed + 2**63) % 2**64) - 2**63 for seed in seeds])
    made = uniform_tensor(signed, torch.tensor(positions))
    assert made.dtype == torch.float64 and torch.equal(made, wanted)
    assert torch.equal(uniform_on(torch.device("cpu"), seeds, positions), wanted)
    assert float(made.min()) >= 0 and float(made.max()) < 1


def test_of_a_device_it_does_what_the_cpu_does() -> None:
    """`meta` has no numbers, but takes the way of a device."""
    assert uniform_on(torch.device("meta"), [2**64 - 1, -7], [3, 4]).shape == (2,)
