"""What clients see of faults, at length: routers, workers and Redis as real processes under steady load, and one fault after another.

Outages of a minute, a worker stopped for 20 s, the routers' own timeouts. The same scenarios as `tests/system`, where they are short.
Nothing here is a matter of speed, so a busy machine does no harm. Ends with 1 where a promise was not kept.
"""

import argparse
import asyncio
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from tests.redis_server import RedisServer
from tests.system.node import Node, why_not
from tests.system.processes import Fleet
from tests.system.scenarios import EVERYTHING, NODES, REDIS, ROUTER_FLAGS, SCENARIOS, SLOW, Scenario, Times, play
from tests.system.slow_redis import SlowWay

LONG = Times(before=10, down=60, stopped=20, after=10, silence=15, rate=16)
QUICK = Times()


def flags(times: Times) -> tuple[str, ...]:
    return (*ROUTER_FLAGS, "--silence-timeout", f"{times.silence:g}", "--hold-timeout", f"{max(30, times.down + 30):g}")


@contextmanager
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="fairlead-faults-") as made:
        yield Path(made)


def run(times: Times, wanted: str) -> Iterator[tuple[Scenario, dict[str, Any], list[str]]]:
    """Each scenario with its outcomes and the promises that it broke."""

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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the lengths of the tests: does it run")
    parser.add_argument("--only", default="", metavar="TEXT", help="scenarios whose name has it")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the outcomes there too")
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
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps({"times": vars(times), "scenarios": rows}, indent=2) + "\n")
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
