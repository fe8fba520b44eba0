"""Fairlead's targets relative to each peer, and the measured ratios: medians over the repeats."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from bench.other_servers.load import Measured

Runs = Mapping[tuple[str, str], Sequence[Measured]]
"""By (server, data)."""


@dataclass(frozen=True)
class Promise:
    """A target: the figure of `ours` divided by the peer's is at least `bound` if more is better, else at most `bound`."""

    peer: str
    figure: str
    bound: float
    more_is_better: bool
    data: tuple[str, ...] = ("random", "prefix")
    ours: str = "fairlead"


@dataclass(frozen=True)
class Kept:
    """A target and the measured ratio."""

    promise: Promise
    data: str
    ratio: float

    @property
    def ok(self) -> bool:
        return self.ratio >= self.promise.bound if self.promise.more_is_better else self.ratio <= self.promise.bound

    def __str__(self) -> str:
        promise = self.promise
        sign = ">=" if promise.more_is_better else "<="
        verdict = "pass" if self.ok else "short"
        return f"{promise.figure:18} / {promise.peer:14} {self.data:7} {self.ratio:6.2f}  {sign} {promise.bound:<4} {verdict}"


PROMISES = (
    Promise("vllm-tuned", "tokens_per_second", 1.7, True, ("random",)),
    Promise("vllm-tuned", "tokens_per_second", 2.3, True, ("prefix",)),
    Promise("vllm-tuned", "ttft_p50", 0.8, False),
    Promise("vllm-tuned", "itl_p99", 2.0, False),
    Promise("vllm-tuned", "startup", 0.2, False),
    Promise("vllm", "tokens_per_second", 1.2, True),
    Promise("vllm", "startup", 0.2, False),
    Promise("transformers", "tokens_per_second", 3.0, True),
    Promise("llama.cpp", "tokens_per_second", 1.5, True),
    *(
        Promise(f"llama.cpp-{kind}", "tokens_per_second", bound, True, data, f"fairlead-{kind}")
        for kind in ("gguf", "q8_0")
        for bound, data in ((1.5, ("random", "prefix")), (1.0, ("single",)))
    ),
)


def figure(runs: Sequence[Measured], name: str) -> float:
    """Return the median of one figure over the repeats."""
    return float(median(getattr(run, name) for run in runs))


def kept(runs: Runs) -> list[Kept]:
    """Return every target for which both sides were measured."""
    found = []
    for promise in PROMISES:
        for name, data in runs:
            if name == promise.peer and data in promise.data and (promise.ours, data) in runs:
                ratio = figure(runs[promise.ours, data], promise.figure) / figure(runs[name, data], promise.figure)
                found.append(Kept(promise, data, ratio))
    return found
