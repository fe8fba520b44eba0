"""The output of `fairlead up`: a live table on a terminal, else one line per change."""

from collections.abc import Callable

from rich.console import Console
from rich.live import Live
from rich.table import Table

from fairlead.local.pod import Pod, PodState

_STYLES = {"Ready": "green", "CrashLoopBackOff": "red", "Terminating": "yellow"}


def pod_table(pods: list[Pod]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for column in ("POD", "PHASE", "LOADED", "RESTARTS", "ADDRESS"):
        table.add_column(column)
    for pod in pods:
        state = pod.state
        phase = f"[{_STYLES.get(state.phase, 'cyan')}]{state.phase}[/]" + (f" {state.reason}" if state.reason else "")
        table.add_row(pod.name, phase, "" if state.percent is None else f"{state.percent} %", str(state.restarts), pod.address)
    return table


class Screen:
    """Show the pods inside a `with` block. Pass `update` as the cluster's `on_change`; it calls `pods` each time."""

    def __init__(self, console: Console, pods: Callable[[], list[Pod]]) -> None:
        self._console = console
        self._pods = pods
        self._printed: dict[str, PodState] = {}
        self._live: Live | None = None

    def __enter__(self) -> "Screen":
        if self._console.is_terminal:
            self._live = Live(console=self._console, refresh_per_second=8, transient=True)
            self._live.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.__exit__(None, None, None)
            self._live = None

    def update(self) -> None:
        pods = self._pods()
        if self._live:
            self._live.update(pod_table(pods))
            return
        for pod in pods:
            before = self._printed.get(pod.name)
            if before is None or (before.phase, before.ready, before.restarts) != (pod.state.phase, pod.state.ready, pod.state.restarts):
                self._print(pod)
            self._printed[pod.name] = pod.state
        gone = set(self._printed) - {pod.name for pod in pods}
        for name in sorted(gone):
            self._console.print(f"{name}  gone", highlight=False)
            del self._printed[name]

    def _print(self, pod: Pod) -> None:
        if pod.state.phase != "Pending":
            self._console.print(
                f"{pod.name}  {pod.state.phase}  {pod.state.reason}".rstrip(), highlight=False, markup=False, soft_wrap=True
            )
