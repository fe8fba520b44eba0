"""Latency, memory, writes and failover of the operator with 1, 100 and 1,000 services of five pods.

etcd, a real API server, the simulated controllers, kubelets and routers, and the operator share one machine.
"""

import argparse
import asyncio
import itertools
import signal
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

from tests.operator.support import apiserver
from tests.operator.support.cluster import wait_for_crds

from bench.common.report import make_parser, write_report
from bench.operator import measures
from bench.operator.api import SERVICES, Api
from bench.operator.fake_cluster import Player
from bench.operator.fake_routers import routers
from bench.operator.operator_process import Operator

BARS: dict[str, tuple[str, float]] = {
    "p99_ms": ("event to applied, p99 (ms)", 250),
    "steady_s": ("cold start until steady (s)", 30),
    "resident_mib": ("resident memory (MiB)", 150),
    "writes": ("writes in an idle minute, beside the lease", 0),
    "writes_per_service": ("writes for an edit and silent routers, per service", 5),  # the edit, the probe, its Event, the index: 4
    "acts_after_s": ("leader killed -9: the other has acted after (s)", 20),
    "both_acted": ("both have acted (0: never)", 0),
    "crd_kb": ("CRD, applied without --server-side (KB)", 90),
    "chart_kb": ("rendered chart (KB)", 300),
    "writes_beside_the_edits": ("writes of a cold start, beside the edits", 0),
}

SILENT = 75.0
"""Seconds without a write after which all probes of silent routers have ended. Longer than a probe."""


class Bench:
    """`figures`: measure → name → value, in the order of measuring."""

    def __init__(self, options: argparse.Namespace, server: apiserver.ApiServer, folder: Path) -> None:
        self.options, self.server, self.folder = options, server, folder
        self.figures: dict[str, measures.Figures] = {}
        self._began = time.monotonic()
        self._values = itertools.count(1000, 1000)  # each edit needs a new value

    def tell(self, words: str) -> None:
        print(f"[{time.monotonic() - self._began:4.0f} s] {words}", flush=True)

    def _progress(self, operator: Operator, words: str) -> None:
        operator.check()
        self.tell(words)

    def found(self, measure: str, figures: measures.Figures) -> None:
        self.figures[measure] = figures
        self.tell(f"{measure}: " + ", ".join(f"{name} {value:.4g}" for name, value in figures.items()))

    async def run(self) -> None:
        self.found("sizes", measures.sizes(self.server))
        wait_for_crds(self.server)
        async with AsyncExitStack() as stack:
            api = Api(self.server, await stack.enter_async_context(Api.session()))
            router = await stack.enter_async_context(routers())
            player = Player(api)
            playing = asyncio.create_task(player.run())
            stack.callback(playing.cancel)

            def start(user: str) -> Operator:
                operator = Operator(self.server, user, router.url, self.folder)
                stack.callback(operator.end, signal.SIGKILL)
                return operator

            operator = start("operator-a")
            services = 0
            for most in self.options.services:
                services = await self._grow(api, player, services, most, operator)
                await operator.settled()
                self.found(f"{services} services, edits", await measures.edits(api, services, self.options.edits, next(self._values)))
            await measures.quiet(self.server, operator)
            self.found(f"{services} services, idle", await measures.idle(self.server, operator, self.options.idle))
            resident, peak = operator.resident
            self.found(f"{services} services, {player.pods} pods, memory", {"resident_mib": resident, "most_resident_mib": peak})
            operator.end()
            operator, figures = await measures.cold_start(api, self.server, services, lambda: start("operator-b"))
            self.found(f"{services} services, cold start", figures)
            router.answering = False
            await self._silence(api, operator, services)
            router.answering = True
            await measures.all_ready(api, services, partial(self._progress, operator))
            standby = start("operator-a")
            await standby.stands_by()
            self.found(f"{services} services, failover", await measures.failover(api, self.server, operator, standby, services))
            if errors := [*operator.errors(), *standby.errors()]:
                self.tell("errors in the logs:\n" + "\n".join(errors[:20]))

    async def _grow(self, api: Api, player: Player, services: int, most: int, operator: Operator) -> int:
        began = time.monotonic()
        for first in range(services, most, 50):
            made = range(first, min(most, first + 50))
            await asyncio.gather(*(api.request("POST", SERVICES, measures.service(number)) for number in made))
        await measures.all_ready(api, most, lambda words: self._progress(operator, f"{words}, {player.pods} pods"))
        if most > services:
            self.found(f"{most} services, creating", {"seconds": time.monotonic() - began})
        return most

    async def _silence(self, api: Api, operator: Operator, services: int) -> None:
        """Give every service a new generation, which needs a new probe, while no router answers.

        Each service reports that once: its probe ends after 60 s (256 run at a time), and three polls of its index fail. Then nothing may
        be written.
        """
        before = len(measures.writes(self.server, operator.user))
        for number in range(services):
            await api.patch(f"{SERVICES}/s{number:04}", {"spec": {"scaling": {"maxReplicas": 9}}})
        await measures.quiet(self.server, operator, SILENT)
        reported = (len(measures.writes(self.server, operator.user)) - before) / services
        figures = await measures.idle(self.server, operator, self.options.idle)
        self.found(f"{services} services, routers silent", {"writes_per_service": reported, **figures})
        figures = await measures.edits(api, services, self.options.edits, next(self._values))
        self.found(f"{services} services, routers silent, edits", figures | {"resident_mib": operator.resident[0]})


def table(figures: dict[str, measures.Figures]) -> list[dict[str, Any]]:
    rows = []
    for measure, found in figures.items():
        for name, value in found.items():
            if name in BARS:
                words, bar = BARS[name]
                rows.append({"measure": measure, "figure": words, "value": round(value, 1), "bar": bar, "met": value <= bar})
    return rows


def main() -> int:
    parser = make_parser(__name__, __doc__)
    parser.add_argument("--quick", action="store_true", help="30 services, ten idle seconds: does it run")
    parser.add_argument("--services", type=lambda text: [int(one) for one in text.split(",")], default=[1, 100, 1000])
    parser.add_argument("--edits", type=int, default=200, help="measured with each number of services")
    parser.add_argument("--idle", type=float, default=60.0, help="seconds")
    options = parser.parse_args()
    if options.quick:
        options.services, options.edits, options.idle = [1, 10, 30], 40, 10.0
    if problem := apiserver.missing():
        print(f"bench: operator/scale: {problem}", file=sys.stderr)
        return 1
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # unwinds, so that nothing is left running
    with apiserver.start() as server, tempfile.TemporaryDirectory() as folder:
        bench = Bench(options, server, Path(folder))
        asyncio.run(bench.run())
    rows = table(bench.figures)
    print()
    for row in rows:
        print(f"{row['measure']:44} {row['figure']:52} {row['value']:9} {row['bar']:6} {'ok' if row['met'] else 'MISSED'}")
    write_report(__name__, options, {"bars": rows, "figures": bench.figures})
    return 0 if all(row["met"] for row in rows) else 2
