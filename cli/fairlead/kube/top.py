"""`fairlead top`: the table, refreshed, with tokens per second measured between two snapshots."""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from fairlead.errors import UserError
from fairlead.kube import table
from fairlead.kube.snapshot import Figures, ServiceRow

ReadRows = Callable[[], list[ServiceRow]]


def add_rates(before: Sequence[ServiceRow], after: Sequence[ServiceRow], seconds: float) -> list[ServiceRow]:
    """Return `after` with the rates and hit rates since `before`. A pod without requests in between keeps its figures."""
    known = {(row.namespace, row.name): row for row in before}
    rated = []
    for row in after:
        old = known.get((row.namespace, row.name))
        pods = {pod.name: pod.figures for pod in old.pods} if old else {}
        fresh = [replace(pod, figures=_add_rate(pods.get(pod.name), pod.figures, seconds)) for pod in row.pods]
        rates = [pod.figures.tokens_per_second for pod in fresh if pod.figures.tokens_per_second is not None]
        together = replace(row.figures, tokens_per_second=sum(rates) if rates else row.figures.tokens_per_second)
        rated.append(replace(row, pods=fresh, figures=together))
    return rated


def _add_rate(old: Figures | None, new: Figures, seconds: float) -> Figures:
    if old is None or old.tokens is None or new.tokens is None or any(was > now for was, now in zip(old.tokens, new.tokens, strict=True)):
        return new  # a restarted worker counts from 0 again
    prompt, cached, output = (now - was for was, now in zip(old.tokens, new.tokens, strict=True))
    return replace(new, tokens_per_second=output / seconds, hit_rate=cached / prompt if prompt else new.hit_rate)


def frames(read_rows: ReadRows, interval: float, sleep: Callable[[float], None] = time.sleep) -> Iterator[tuple[list[ServiceRow], str]]:
    """Yield (rows with rates, problem). If the cluster does not answer, yield the last rows. The first snapshot may raise UserError."""
    before, at = read_rows(), time.monotonic()
    shown: list[ServiceRow] = before
    while True:
        sleep(interval)
        try:
            after, then = read_rows(), time.monotonic()
        except UserError as error:
            yield shown, str(error)
            continue
        shown = add_rates(before, after, max(then - at, 1e-3))
        before, at = after, then
        yield shown, ""


def run(console: Console, read_rows: ReadRows, *, interval: float, once: bool, namespaces: bool, pods: bool) -> int:
    """Show the table until Ctrl-C. With `once`, or without a terminal: print one table rated of two snapshots."""
    if once or not console.is_terminal:
        rows, problem = next(frames(read_rows, interval))
        if problem:
            raise UserError(problem)
        console.print(table.build_table(rows, namespaces=namespaces, pods=pods, width=console.width) if rows else "no InferenceServices")
        return 0
    with contextlib.suppress(KeyboardInterrupt), Live(console=console, screen=True, auto_refresh=False) as live:
        live.update(Text("reading …"), refresh=True)
        for rows, problem in frames(read_rows, interval):
            clock = Text(f"{time.strftime('%H:%M:%S')}  every {interval:g} s, Ctrl-C to quit", style="dim")
            shown = table.build_table(rows, namespaces=namespaces, pods=pods, width=console.width)
            live.update(Group(clock, shown, Text(problem, style="red")), refresh=True)
    return 0
