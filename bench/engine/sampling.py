"""CPU time of token sampling with a vocabulary of 151,936 (Qwen3's), beside the earlier implementation.

One thread. The two implementations alternate. `same` counts the rows for which both choose the same token.
"""

import statistics
import time
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import torch

from bench.common.report import make_parser, write_report
from fairlead_worker.ipc.messages import Sampling
from fairlead_worker.sampling.noise import uniform
from fairlead_worker.sampling.sampler import sample
from fairlead_worker.scheduler.request import Request

VOCABULARY = 151_936
NARROW = 64
CASES: dict[str, tuple[dict[str, Any], float]] = {
    "greedy": ({"temperature": 0}, 1.5),
    "temperature": ({}, 1.5),
    "top_k 20": ({"top_k": 20}, 1.5),
    "top_k 20, top_p 0.95": ({"top_k": 20, "top_p": 0.95, "temperature": 0.6}, 1.5),
    "top_k 500": ({"top_k": 500}, 1.5),
    "top_p 0.95": ({"top_p": 0.95}, 1.5),
    "top_p 0.95, flat": ({"top_p": 0.95}, 0.1),
    "min_p 0.05": ({"min_p": 0.05}, 1.5),
}
"""Sampling parameters, and the steepness of the distribution."""


def sample_as_before(logits: torch.Tensor, requests: Sequence[Request]) -> list[int]:
    logits = logits.float()
    tokens = logits.argmax(1)
    random = [i for i, request in enumerate(requests) if request.sampling.temperature > 0]
    if random:
        tokens[random] = draw_as_before(logits[random], [requests[i] for i in random])
    answer: list[int] = tokens.tolist()
    return answer


def draw_as_before(logits: torch.Tensor, requests: Sequence[Request]) -> torch.Tensor:
    samplings = [request.sampling for request in requests]
    temperature = torch.tensor([s.temperature for s in samplings], dtype=logits.dtype)
    scaled = (logits - logits.amax(1, keepdim=True)) / temperature[:, None]
    cumulative = filter_as_before(scaled, samplings).softmax(1, dtype=torch.float64).cumsum(1)
    noise = uniform([s.seed for s in samplings], [len(request.tokens) for request in requests])
    total = cumulative[:, -1]
    target = torch.minimum(torch.from_numpy(noise) * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, target[:, None], right=True)[:, 0].clamp_(max=logits.shape[1] - 1)


def filter_as_before(logits: torch.Tensor, samplings: Sequence[Sampling]) -> torch.Tensor:
    vocabulary = logits.shape[1]
    narrow = [i for i, s in enumerate(samplings) if 0 < s.top_k <= NARROW]
    wide = [i for i, s in enumerate(samplings) if not 0 < s.top_k <= NARROW and (0 < s.top_k < vocabulary or s.top_p < 1.0)]
    for rows, width in ((narrow, min(NARROW, vocabulary)), (wide, vocabulary)):
        if rows:
            logits = logits.index_copy(
                0, torch.tensor(rows, device=logits.device), top_as_before(logits[rows], [samplings[i] for i in rows], width)
            )
    if any(s.min_p > 0 for s in samplings):
        floor = torch.tensor([s.min_p for s in samplings], device=logits.device).log()
        logits = logits.masked_fill(logits < (logits.amax(1) + floor)[:, None], float("-inf"))
    return logits


def top_as_before(logits: torch.Tensor, samplings: Sequence[Sampling], width: int) -> torch.Tensor:
    device, vocabulary = logits.device, logits.shape[1]
    ordered, tokens = torch.topk(logits, width) if width < vocabulary else torch.sort(logits, dim=1, descending=True, stable=True)
    top_k = torch.tensor([min(s.top_k, vocabulary) if s.top_k > 0 else vocabulary for s in samplings], device=device)
    ordered = ordered.masked_fill(torch.arange(width, device=device) >= top_k[:, None], float("-inf"))
    top_p = torch.tensor([s.top_p for s in samplings], dtype=torch.float64, device=device)
    probabilities = ordered.softmax(1, dtype=torch.float64)
    before = probabilities.cumsum(1) - probabilities
    dropped = (before >= top_p[:, None]) & (top_p < 1.0)[:, None]
    dropped[:, 0] = False
    ordered = ordered.masked_fill(dropped, float("-inf"))
    return torch.full_like(logits, float("-inf")).scatter_(1, tokens, ordered)


def requests(rows: int, settings: dict[str, Any]) -> list[Request]:
    return [Request(str(i), array("I", range(9)), 9, Sampling(max_tokens=9, seed=i, **settings), root=0, arrival=i) for i in range(rows)]


def measure(ways: dict[str, Callable[..., Any]], logits: torch.Tensor, asked: list[Request], repeats: int) -> dict[str, float]:
    """Return the median CPU milliseconds of each implementation. They run in turns."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, way in ways.items():
            began = time.thread_time_ns()
            way(logits, asked)
            times[name].append((time.thread_time_ns() - began) / 1e6)
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    parser = make_parser(__name__, __doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    results: list[dict[str, Any]] = []
    print(f"{'case':22}{'rows':>6}{'before':>10}{'now':>10}{'ratio':>8}   (ms)")
    for rows in options.rows:
        ranks = torch.stack([torch.randperm(VOCABULARY) for _ in range(rows)]) + 1.0
        for case, (settings, steepness) in CASES.items():
            logits, asked = (-steepness * ranks.log()).bfloat16(), requests(rows, settings)
            same = sum(a == b for a, b in zip(sample_as_before(logits, asked), sample(logits, asked)[0], strict=True))
            took = measure({"before": sample_as_before, "now": sample}, logits, asked, options.repeats)
            results.append({"case": case, "rows": rows, "same_tokens": same} | took)
            print(f"{case:22}{rows:>6}{took['before']:>10.2f}{took['now']:>10.2f}{took['before'] / took['now']:>8.1f}   {same}/{rows} same")
    write_report(__name__, options, results)
