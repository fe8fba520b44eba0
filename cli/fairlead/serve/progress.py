"""Progress of workers that start: one bar for each step on a terminal, else one line for each step and tenth of it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from fairlead.local.pod import PodState

NAMES = {
    "imports": "start",
    "nodes": "wait for the other nodes",
    "config": "read the configuration",
    "wait": "wait",
    "download": "download",
    "weights": "load weights",
    "fuse": "fuse layers",
    "adapters": "load adapters",
    "compile": "compile kernels",
    "profile": "measure memory",
    "capture": "capture CUDA graphs",
    "cache": "allocate the KV cache",
    "trial": "try CUDA graphs and overlap",
    "warmup": "warm up",
    "grammars": "prepare grammars",
}
"""Steps of a worker's start, as `ipc.messages.Loading.phase` names them."""
PERCENTS_PER_LINE = 10
"""Percents of a step between two of its lines."""

READY = "ready"


@dataclass(frozen=True)
class Step:
    """One step of a worker's start. `percent` is None if the step counts nothing."""

    name: str
    percent: int | None
    amount: str = ""


def step_of(state: PodState) -> Step:
    """Return the step that a pod's state shows."""
    if state.ready:
        return Step(READY, None)
    if state.phase in ("Starting", "starting"):  # no process answers yet, or it answers and its engine does not run yet
        return Step("start", None)
    if state.phase != "loading":
        return Step(state.phase.lower() + (f" ({state.reason})" if state.reason else ""), None)
    word, _, detail = state.reason.partition(" ")
    name = " ".join(filter(None, (NAMES.get(word, word), detail)))
    if state.total_bytes:
        return Step(name, state.percent, f"{decimal(state.bytes)} of {decimal(state.total_bytes)}")
    return Step(name, state.percent or None)


class Shown(Protocol):
    """What has a bar: a pod, or a download."""

    name: str
    state: PodState


class StartUpProgress:
    """Show the steps of all pods inside a `with` block. Pass `update` as the cluster's `on_change`."""

    def __init__(self, console: Console, pods: Callable[[], Sequence[Shown]]) -> None:
        self._console = console
        self._pods = pods
        self._bars: Progress | None = None
        self._tasks: dict[str, TaskID] = {}
        self._shown: dict[str, Step] = {}

    def __enter__(self) -> "StartUpProgress":
        if self._console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[amount]}"), TimeElapsedColumn())
            self._bars = Progress(*columns, console=self._console)
            self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bars:
            self._bars.stop()
            self._bars = None

    def update(self) -> None:
        """Show the pods' present states."""
        pods = self._pods()
        for pod in pods:
            step, before = step_of(pod.state), self._shown.get(pod.name)
            if pod.state.phase in ("Pending", "Terminating") or step == before:
                continue
            label = f"{pod.name}: {step.name}" if len(pods) > 1 else step.name
            if self._bars:
                self._draw(self._bars, pod.name, label, step, is_new=before is None or before.name != step.name)
                self._shown[pod.name] = step
            elif before is None or before.name != step.name or _tenth(step) > _tenth(before):
                percent = f"{step.percent} %" if step.percent else ""
                self._console.print("  ".join(filter(None, (label, percent, step.amount))), markup=False, soft_wrap=True)
                self._shown[pod.name] = step

    def _draw(self, bars: Progress, pod: str, label: str, step: Step, *, is_new: bool) -> None:
        last = self._tasks.get(pod)
        if is_new and last is not None:
            bars.update(last, total=100, completed=100)
            bars.stop_task(last)
        if step.name == READY:
            return
        if is_new:
            self._tasks[pod] = bars.add_task(label, total=None, amount="")
        bars.update(self._tasks[pod], total=None if step.percent is None else 100, completed=step.percent or 0, amount=step.amount)


def _tenth(step: Step) -> int:
    return (step.percent or 0) // PERCENTS_PER_LINE
