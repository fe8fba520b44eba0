"""What clients see of faults in routers, workers and Redis, one fault after another under steady load.

All are real processes. Outages last a minute, a worker is stopped for 20 s, and the routers use their own timeouts. `tests/system` runs
the same scenarios with shorter times. No figure depends on speed, so a busy machine does no harm. The exit status is 1 if a promise is
broken.
"""

import asyncio
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from tests.servers.redis_server import RedisServer
from tests.system.node import Node, why_not
from tests.system.processes import Fleet
from tests.system.scenarios import EVERYTHING, NODES, REDIS, ROUTER_FLAGS, SCENARIOS, SLOW, Scenario, Times, play
from tests.system.slow_redis import SlowWay

from bench.common.report import make_parser, write_report

LONG = Times(before=10, down=60, stopped=20, after=10, silence=15, rate=16)
QUICK = Times()


def flags(times: Times) -> tuple[str, ...]:
    return (*ROUTER_FLAGS, "--silence-timeout", f"{times.silence:g}", "--hold-timeout", f"{max(30, times.down + 30):g}")


@contextmanager
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="fairlead-faults-") as made:
        yield Path(made)


def run(times: Times, wanted: str) -> Iterator[tuple[Scenario, dict[str, Any], list[str]]]:
    """Yield each scenario with its outcomes and the promises that it broke."""

    def asked(scenario: Scenario) -> bool:
        return wanted.lower() in scenario.name.lower()

    if indexed := list(filter(asked, (*SCENARIOS, *REDIS, EVERYTHING))):
        with folder() as place, RedisServer() as redis, Fleet(place, redis=redis.url, flags=flags(times)) as fleet:
            for scenario in indexed:
                report, broken = asyncio.run(play(scenario, fleet, times, redis=redis))
                yield scenario, report.row(), broken
    if asked(SLOW):
        with folder() as place, RedisServer() as redis, SlowWay(redis.port) as way:
            fleet = Fleet(place, redis=f"redis://127.0.0.1:{way.port}/0", flags=flags(times))
            with fleet:
                report, broken = asyncio.run(play(SLOW, fleet, times, way=way))
                yield SLOW, report.row(), broken
    if asked(NODES) and not why_not():
        with folder() as place, Node(0) as dark, Node(1) as mute:
            fleet = Fleet(place, workers=1, nodes=(dark, mute), policy="RoundRobin", flags=flags(times))
            with fleet:
                report, broken = asyncio.run(play(NODES, fleet, times, nodes=(dark, mute)))
                yield NODES, report.row(), broken


def main() -> int:
    parser = make_parser(__name__, __doc__)
    parser.add_argument("--quick", action="store_true", help="the lengths of the tests: does it run")
    parser.add_argument("--only", default="", metavar="TEXT", help="scenarios whose name has it")
    arguments = parser.parse_args()
    console, times = Console(width=170), QUICK if arguments.quick else LONG
    rows, failed = {}, False
    for scenario, row, broken in run(times, arguments.only):
        rows[scenario.name] = row | {"broken_promises": broken}
        console.print(f"{scenario.name}: {'; '.join(broken) or 'kept'}", markup=False)
        failed |= bool(broken)
    if why_not():
        console.print(f"not run: {NODES.name}: {why_not()}")
    table = Table(box=None, header_style="dim")
    columns = [column for column in next(iter(rows.values()), {}) if column != "broken_promises"]
    for column in ("fault", *columns):
        table.add_column(column.replace("_", " "), justify="left" if column == "fault" else "right")
    for name, row in rows.items():
        table.add_row(name, *(str(row[column]) for column in columns))
    console.print(table)
    write_report(__name__, arguments, {"times": vars(times), "scenarios": rows})
    return int(failed)
