"""One table: each service, and below it its pods."""

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fairlead.kube.snapshot import Figures, ServiceRow

COLUMNS = ("RUNNING", "QUEUE", "KV USE", "HIT RATE", "TOKENS/S")
_GOOD, _UNDER_WAY = {"Ready", "Serving"}, {"Starting", "Loading", "RollingOut", "Probing", "Draining", "Terminating", "NotReady", "Avoided"}


def services(rows: Sequence[ServiceRow], *, namespaces: bool, pods: bool = True) -> Table:
    """`namespaces`: with a column of their names."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    if namespaces:
        table.add_column("NAMESPACE", no_wrap=True)
    table.add_column("NAME", no_wrap=True)
    for column in ("READY", "STATE", "LOADING"):
        table.add_column(column, no_wrap=True)
    for column in COLUMNS:
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        start = [row.namespace] if namespaces else []
        table.add_row(*start, f"[bold]{row.name}[/]", row.counts, _state(row.reason, row.ready), row.loading, *figures(row.figures))
        for number, pod in enumerate(row.pods if pods else ()):
            branch = "└ " if number == len(row.pods) - 1 else "├ "
            restarts = f" ({pod.restarts} restarts)" if pod.restarts else ""
            state = _state(pod.state, pod.state == "Ready") + restarts
            table.add_row(*([""] if namespaces else []), branch + pod.name, "", state, pod.loading, *figures(pod.figures))
    return table


def words(console: Console, rows: Sequence[ServiceRow]) -> None:
    """Below the table: why, of each service that is not ready."""
    for row in rows:
        reasons = [f"{row.reason}: {row.message}"] if not row.ready else []
        for one in [*reasons, *row.notes]:
            style = "yellow" if not row.ready or one not in reasons else None
            console.print(escape(f"{row.namespace}/{row.name}: {one}"), style=style, highlight=False, soft_wrap=True)


def figures(found: Figures) -> list[str]:
    return [
        "-" if found.running is None else str(found.running),
        "-" if found.queued is None else str(found.queued),
        "-" if found.kv_use is None else f"{found.kv_use:.0%}",
        "-" if found.hit_rate is None else f"{found.hit_rate:.0%}",
        "-" if found.tokens_per_second is None else f"{found.tokens_per_second:,.0f}",
    ]


def _state(word: str, good: bool) -> str:
    style = "green" if good or word in _GOOD else "yellow" if word in _UNDER_WAY else "red"
    return f"[{style}]{escape(word)}[/]"
