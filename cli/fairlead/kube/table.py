"""One table: each service, and below it its pods."""

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fairlead.console import fit_table
from fairlead.kube.snapshot import Figures, ServiceRow

COLUMNS = ("RUNNING", "QUEUE", "KV USE", "HIT RATE", "TOKENS/S")
_OPTIONAL = ("LOADING", "HIT RATE", "KV USE", "TOKENS/S", "NAMESPACE")
"""Columns that a narrow terminal leaves out, the first first."""
_GOOD, _UNDER_WAY = (
    {"Ready", "Serving", "Asleep"},
    {"Starting", "Loading", "RollingOut", "Probing", "Draining", "Terminating", "NotReady", "Avoided"},
)


def build_table(rows: Sequence[ServiceRow], *, namespaces: bool, pods: bool = True, width: int = 1000) -> Table:
    """Return the table. `namespaces`: with a column of namespaces. `pods`: with a row for each pod. `width`: of the terminal."""
    lines = []
    for row in rows:
        lines.append([row.namespace, f"[bold]{row.name}[/]", row.counts, _state(row.reason, row.ready), row.loading, *_format(row.figures)])
        for number, pod in enumerate(row.pods if pods else ()):
            branch = "└ " if number == len(row.pods) - 1 else "├ "
            restarts = f" ({pod.restarts} restarts)" if pod.restarts else ""
            state = _state(pod.state, pod.state == "Ready") + restarts
            lines.append(["", branch + pod.name, "", state, pod.loading, *_format(pod.figures)])
    headers = ["NAMESPACE", "NAME", "READY", "STATE", "LOADING", *COLUMNS]
    first = 0 if namespaces else 1
    return fit_table(headers[first:], [line[first:] for line in lines], left=5 - first, width=width, optional=_OPTIONAL)


def print_messages(console: Console, rows: Sequence[ServiceRow]) -> None:
    """Print why each service is not ready, and its notes."""
    for row in rows:
        reasons = [f"{row.reason}: {row.message}"] if not row.ready else []
        for one in [*reasons, *row.notes]:
            style = "yellow" if not row.ready or one not in reasons else None
            console.print(escape(f"{row.namespace}/{row.name}: {one}"), style=style, highlight=False, soft_wrap=True)


def _format(figures: Figures) -> list[str]:
    return [
        "-" if figures.running is None else str(figures.running),
        "-" if figures.queued is None else str(figures.queued),
        "-" if figures.kv_use is None else f"{figures.kv_use:.0%}",
        "-" if figures.hit_rate is None else f"{figures.hit_rate:.0%}",
        "-" if figures.tokens_per_second is None else f"{figures.tokens_per_second:,.0f}",
    ]


def _state(word: str, good: bool) -> str:
    style = "green" if good or word in _GOOD else "yellow" if word in _UNDER_WAY else "red"
    return f"[{style}]{escape(word)}[/]"
