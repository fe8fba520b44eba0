"""Where the time of a runner's steps goes, from the events of torch's profiler.

An event has the kind of the innermost range around it. While the profile lasts, ranges surround attention, linear layers, the model and
sampling, on this runner's own objects. A kernel that a graph replays has no range and is classified by its name.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from fairlead_worker.execution.runner import ModelRunner
from fairlead_worker.model.fuse import Slice
from fairlead_worker.scheduler.plan import StepPlan, StepResult

WARM_UP = 3
"""Steps before the profile: the first ones build what later ones reuse."""
WINDOW = 16
"""Steps whose events are held in memory together: one step has some thousands."""
PREFIX = "fairlead "
STEP = PREFIX + "step"
RANGES = {PREFIX + kind: kind for kind in ("attention", "GEMM", "model", "sampling", "host")} | {STEP: "host"}
NAMES = {
    "GEMM": ("gemm", "cutlass", "nvjet", "cublas", "xmma", "::mm", "::addmm", "::bmm", "::linear", "splitk"),
    "attention": ("attention", "batchprefill", "batchdecode", "persistentvariable", "mergestates", "appendpaged", "flash", "fmha"),
    "copies": ("memcpy", "memset"),
}
"""Parts of kernel names, in lower case."""
WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize")


class Account:
    """Seconds by kind, summed over steps."""

    def __init__(self) -> None:
        self.steps = 0
        self.step_seconds = 0.0
        """Time inside steps, by the profiler's own clock."""
        self.between_seconds = 0.0
        """Time from a step's end to the start of the next: the scheduler, messages, and waiting for requests."""
        self.host: Counter[str] = Counter()
        """Time of the step's own thread, by kind; sums to `step_seconds`."""
        self.device: Counter[str] = Counter()
        """Time of kernels, by kind."""
        self.busy_seconds = 0.0
        """Time in which any kernel ran."""

    def add(self, events: Iterable[Any]) -> None:
        """Add a window of `FunctionEvent`s."""
        spans: list[tuple[float, float]] = []
        for event in events:
            if event.device_type != torch.autograd.DeviceType.CPU:  # type: ignore[attr-defined]  # torch does not list it
                if not getattr(event, "is_user_annotation", False) and event.name not in RANGES:
                    spans.append((event.time_range.start, event.time_range.end))
                continue
            kind = _kind(event)
            if kind is None:
                continue
            if event.name == STEP:
                self.steps += 1
                self.step_seconds += event.cpu_time_total / 1e6
            self.host["waiting" if event.name in WAITS else kind] += event.self_cpu_time_total / 1e6
            for kernel in event.kernels:
                self.device[_named(kernel.name) or kind if kind in ("host", "model") else kind] += kernel.duration / 1e6
        self.busy_seconds += covered(spans) / 1e6

    def report(self, device: str) -> dict[str, Any]:
        """Return the profile as JSON values.

        `shares` of the time in steps sum to 1: on a CPU by what the thread did, on a GPU by its kernels and `idle`.
        """
        whole = self.step_seconds or 1.0
        if device == "cpu":
            shares = {kind: seconds / whole for kind, seconds in self.host.items()}
        else:
            overlapped = max(1.0, sum(self.device.values()) / self.busy_seconds) if self.busy_seconds else 1.0
            shares = {kind: seconds / overlapped / whole for kind, seconds in self.device.items()}
            shares["idle"] = max(0.0, 1 - sum(shares.values()))
        return {
            "device": device,
            "steps": self.steps,
            "step_seconds": self.step_seconds,
            "between_seconds": self.between_seconds,
            "shares": dict(sorted(shares.items(), key=lambda item: -item[1])),
            "host_seconds": dict(self.host),
            "device_seconds": dict(self.device),
        }


def _kind(event: Any) -> str | None:
    """Return the kind of the innermost range around `event`; None outside of steps."""
    found, at = None, event
    while at is not None:
        found = found or RANGES.get(at.name)
        if at.name == STEP:
            return found
        at = at.cpu_parent
    return None


def _named(kernel: str) -> str | None:
    small = kernel.lower()
    return next((kind for kind, parts in NAMES.items() if any(part in small for part in parts)), None)


def covered(spans: list[tuple[float, float]]) -> float:
    """Return the time that lies in any of the spans, (begin, end) each."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def describe(report: dict[str, Any]) -> str:
    """Return the report as text."""
    steps = report["steps"]
    if not steps:
        return "no step was profiled"
    each, between = (1e3 * report[name] / steps for name in ("step_seconds", "between_seconds"))
    shares = ", ".join(f"{kind} {share:.1%}" for kind, share in report["shares"].items() if share >= 0.0005)
    text = f"{steps} steps of {each:.3f} ms on {report['device']}: {shares}; {between:.3f} ms between steps"
    if report["device"] != "cpu":
        waiting = report["host_seconds"].get("waiting", 0.0)
        text += f"; of a step the host worked {1e3 * (report['step_seconds'] - waiting) / steps:.3f} ms and waited for the device the rest"
    return text


class Profiled:
    """Wraps a runner and profiles some of its steps. Afterwards the runner is unchanged."""

    def __init__(self, runner: ModelRunner, steps: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self._runner, self._left, self._clock = runner, steps, clock
        self._skip = WARM_UP
        self._window: list[Any] = []
        self._in_window = 0
        self._ended: float | None = None
        self.account = Account()

    def execute(self, plan: StepPlan) -> StepResult:
        if not plan or not self._left or self._skip:
            self._skip -= bool(plan and self._skip)
            return self._runner.execute(plan)
        if not self._window:
            self._begin()
        elif self._ended is not None:
            self.account.between_seconds += self._clock() - self._ended
        try:
            with _ranges(self._runner), record_function(STEP):
                result = self._runner.execute(plan)
                if self._runner.loaded.device.type == "cuda":
                    torch.cuda.synchronize(self._runner.loaded.device)
        except BaseException:
            self._end()
            raise
        self._left -= 1
        self._in_window += 1
        if self._in_window == WINDOW or not self._left:
            self._end()
        self._ended = self._clock() if self._window else None
        return result

    @property
    def is_done(self) -> bool:
        return not self._left

    def _begin(self) -> None:
        cuda = self._runner.loaded.device.type == "cuda"
        made = profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])])
        made.start()
        self._window.append(made)

    def _end(self) -> None:
        if self._window:
            made = self._window.pop()
            made.stop()
            self.account.add(made.events())
        self._in_window = 0


def _in(kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def ranged(*arguments: Any, **named: Any) -> Any:
        with record_function(PREFIX + kind):
            return function(*arguments, **named)

    return ranged


@contextmanager
def _ranges(runner: ModelRunner) -> Iterator[None]:
    """Put ranges around the parts of a step while the context is open."""
    backend: Any = runner.backend
    planned = backend.plan

    def plan(step: Any) -> Any:
        with record_function(PREFIX + "host"):
            context = planned(step)
        if hasattr(context, "__dict__"):
            context.attend = _in("attention", context.attend)
        return context

    linears = [part for part in runner.loaded.model.modules() if hasattr(part, "out_features") and not isinstance(part, Slice)]
    before = [(part, vars(part).get("forward")) for part in linears]
    places: list[tuple[Any, str, Any]] = [(backend, "plan", plan), (runner, "_choose", _in("sampling", runner._choose))]
    forward: Any = runner.forward
    shown = _Shown(forward)
    for part in linears:
        part.forward = _in("GEMM", part.forward)
    for owner, name, made in places:
        setattr(owner, name, made)
    runner.forward = shown
    try:
        yield
    finally:
        runner.forward = forward
        for owner, name, _ in places:
            delattr(owner, name)
        for part, old in before:
            if old is None:
                del part.forward
            else:
                part.forward = old


class _Shown:
    """Wraps a forward in a range. Implements `execution.forward.Forward`."""

    def __init__(self, forward: Any) -> None:
        self._forward = forward
        self.can_score: bool = forward.can_score

    def __call__(self, step: Any, context: Any) -> torch.Tensor:
        with record_function(PREFIX + "model"):
            logits: torch.Tensor = self._forward(step, context)
        return logits

    def score(self, step: Any, context: Any, places: torch.Tensor) -> Any:
        with record_function(PREFIX + "model"):
            return self._forward.score(step, context, places)
