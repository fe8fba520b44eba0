"""The workload that `--workload` names: a generator or a file."""

import random
from collections.abc import Callable
from pathlib import Path

from fairlead.simulate.workloads.agents import agents
from fairlead.simulate.workloads.azure import read_azure
from fairlead.simulate.workloads.bursts import bursts
from fairlead.simulate.workloads.mooncake import read_trace
from fairlead.simulate.workloads.request import Request, necessary_tokens, rotate
from fairlead.simulate.workloads.zipf import zipf_documents

GENERATORS: dict[str, Callable[[int, float, random.Random], list[Request]]] = {"zipf": zipf_documents, "agents": agents, "bursts": bursts}
"""Functions of the number of requests, the `necessary_tokens` per second, and a random generator."""
GENERATED = 6000
"""Requests of a generator without `--num-prompts`."""


def load(workload: str, *, count: int | None, speed: float, capacity: float, seeds: list[int]) -> list[list[Request]]:
    """Return one list of requests for each run. A generator has other requests in each run, a file another start time.

    `capacity`: prompt tokens per second that the fleet computes. At speed 1 a generator needs all of it (`necessary_tokens`).
    """
    generator = GENERATORS.get(workload)
    if generator is not None:
        return [generator(count or GENERATED, speed * capacity, random.Random(f"{workload}/{seed}")) for seed in seeds]
    path = Path(workload)
    requests = (read_azure if path.suffix == ".csv" else read_trace)(path, count=count, speed=speed)
    return [rotate(requests, number / len(seeds)) for number in range(len(seeds))]


def offered_load(requests: list[Request], capacity: float) -> float:
    """Return the necessary tokens per second over those that the fleet computes. Above 1, the queues grow with every policy."""
    return necessary_tokens(requests) / max(requests[-1].at - requests[0].at, 1e-9) / capacity
