"""The workload that `--workload` names: a generator or a file."""

import random
from collections.abc import Callable
from pathlib import Path

from fairlead.simulate.pods import PodModel
from fairlead.simulate.workloads.generators import agents, bursts, zipf_documents
from fairlead.simulate.workloads.request import Request, necessary_each, necessary_tokens, rotate
from fairlead.simulate.workloads.traces import read_azure, read_mooncake

Generator = Callable[[int, float, random.Random], list[Request]]
GENERATORS: dict[str, Generator] = {"zipf": zipf_documents, "agents": agents, "bursts": bursts}
"""Functions of the number of requests, the `necessary_tokens` per second, and a random generator."""
GENERATED = 6000
"""Requests of a generator without `--num-prompts`."""
MOST_DRAFTS = 8
"""Drafts for a number of seconds. The span is not proportional to the number of requests, because later ones share more prefixes."""


def load(
    workload: str, *, count: int | None, speed: float, pods: int, model: PodModel, seeds: list[int], seconds: float | None = None
) -> list[list[Request]]:
    """Return one list of requests for each run. A generator has other requests in each run, a file another start time.

    At speed 1 a generator needs all that the pods can do (`offered_load`). `seconds`: as many requests as arrive in this time, not `count`.
    """
    generator = GENERATORS.get(workload)
    if generator is not None:
        return [_generate(generator, f"{workload}/{seed}", count or GENERATED, speed * pods, model, seconds) for seed in seeds]
    path = Path(workload)
    requests = (read_azure if path.suffix == ".csv" else read_mooncake)(path, count=count, speed=speed)
    runs = [rotate(requests, number / len(seeds)) for number in range(len(seeds))]
    return runs if seconds is None else [[request for request in run if request.at <= seconds] for run in runs]


def offered_load(requests: list[Request], pods: int, model: PodModel) -> float:
    """Return the necessary work over what the pods can do. Above 1, the queues grow with every policy.

    It is the prompt tokens that even one unlimited cache would not have, and the decodes of all answers.
    """
    return _necessary_seconds(requests, model) / max(requests[-1].at - requests[0].at, 1e-9) / pods


def _necessary_seconds(requests: list[Request], model: PodModel) -> float:
    return sum(model.work_seconds(request, tokens) for request, tokens in zip(requests, necessary_each(requests), strict=True))


def _generate(generator: Generator, seed: str, count: int, pods: float, model: PodModel, seconds: float | None) -> list[Request]:
    """Return requests that need this number of pods. The prompts leave to decodes what the first draft says."""
    requests: list[Request] = []
    for _ in range(1 if seconds is None else MOST_DRAFTS):
        draft = generator(count, pods * model.rate, random.Random(seed))
        share = necessary_tokens(draft) / model.rate / _necessary_seconds(draft, model)
        requests = generator(count, share * pods * model.rate, random.Random(seed))
        span = requests[-1].at
        if seconds is None or abs(span - seconds) <= 0.02 * seconds:
            break
        count = max(2, round(count * seconds / span))
    return requests
