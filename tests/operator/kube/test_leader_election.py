"""The elector with a Lease in memory and a clock that the tests set; and two real operators on a real API server."""

import asyncio
import copy
import itertools
import json
import os
import re
import signal
import subprocess
import time
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.operator.process.test_process import COMMAND, FLAGS, environment
from tests.operator.support import apiserver
from tests.operator.support.cluster import Cluster as Namespace
from tests.operator.support.cluster import eventually

from fairlead_operator.kube.client import ApiError, Cluster
from fairlead_operator.kube.kinds import PODS, Kind
from fairlead_operator.kube.leader_election import EXIT_FENCED, LeaderElector, Timing
from fairlead_operator.process.loop_thread import LoopThread


class LeaseServer:
    """One Lease with optimistic locking, as on the API server. `down`: no request is answered."""

    def __init__(self) -> None:
        self.held: dict[str, Any] | None = None
        self.down = False
        self._versions = itertools.count(1)

    async def get(self, kind: Kind, namespace: str, name: str) -> dict[str, Any] | None:
        self._reached()
        return copy.deepcopy(self.held)

    async def create(self, kind: Kind, body: dict[str, Any]) -> dict[str, Any]:
        self._reached()
        if self.held is not None:
            raise ApiError(409, "exists")
        return self._store(body)

    async def replace(self, kind: Kind, body: dict[str, Any]) -> dict[str, Any]:
        self._reached()
        if self.held is None or body["metadata"]["resourceVersion"] != self.held["metadata"]["resourceVersion"]:
            raise ApiError(409, "another version")
        return self._store(body)

    def _reached(self) -> None:
        if self.down:
            raise OSError("no route")

    def _store(self, body: dict[str, Any]) -> dict[str, Any]:
        self.held = copy.deepcopy({**body, "metadata": {**body["metadata"], "resourceVersion": str(next(self._versions))}})
        return copy.deepcopy(self.held)


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Fenced(BaseException):
    pass


def fence(reason: str) -> None:
    raise Fenced(reason)


def elector(server: LeaseServer, clock: Clock, holder_identity: str) -> LeaderElector:
    return LeaderElector(cast(Cluster, server), "ns", "lease", holder_identity=holder_identity, fence=fence, clock=clock)


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["try", "release", "wait", "down", "up"]), st.floats(0, 20)), max_size=60)
)
@settings(deadline=None, max_examples=150)
def test_at_most_one_operator_leads_and_one_can_always_lead(steps: list[tuple[str, str, float]]) -> None:
    async def run() -> None:
        server, clock = LeaseServer(), Clock()
        all_of_them = {name: elector(server, clock, name) for name in "abc"}
        for name, step, seconds in steps:
            if step == "try":
                await all_of_them[name]._try()
            elif step == "release":
                await all_of_them[name].release()
            elif step == "wait":
                clock.now += seconds
            else:
                server.down = step == "down"
            assert sum(one.leading for one in all_of_them.values()) <= 1
        server.down = False
        for _ in range(3):  # read, wait for its end, take
            await all_of_them["a"]._try()
            clock.now += 7.6
        await all_of_them["a"]._try()
        assert all_of_them["a"].leading

    asyncio.run(run())


async def test_a_holder_that_cannot_renew_is_fenced_before_others_may_take_over() -> None:
    server, clock = LeaseServer(), Clock()
    first, second = elector(server, clock, "first"), elector(server, clock, "second")
    await first.acquire()
    assert first.check() == 15 and not await second._try()
    server.down = True
    clock.now += 9
    assert not await first._try() and first.leading and first.check() == 6
    clock.now += 2
    with pytest.raises(Fenced, match="without the lease"):
        first.check()
    server.down = False
    assert not await second._try(), "four seconds are left to writes that were under way"
    clock.now += 4.1
    assert await second._try() and server.held is not None and server.held["spec"]["leaseTransitions"] == 2


async def test_a_standby_tries_again_when_the_lease_runs_out_and_not_up_to_a_retry_later() -> None:
    server, clock = LeaseServer(), Clock()
    first, second = elector(server, clock, "first"), elector(server, clock, "second")
    await first.acquire()
    assert not await second._try() and second._retry_delay() == 2
    clock.now += 14.5
    assert not await second._try() and second._retry_delay() == 0.5
    clock.now += 0.5
    assert second._retry_delay() == 2, "if that attempt fails, the next is not at once"
    assert await second._try()


async def test_a_released_lease_is_taken_at_once_and_one_taken_away_is_lost() -> None:
    server, clock = LeaseServer(), Clock()
    first, second = elector(server, clock, "first"), elector(server, clock, "second")
    await first.acquire()
    await first.release()
    assert not first.leading
    await second.acquire()
    assert server.held is not None
    server.held["spec"]["holderIdentity"] = "a person"
    server.held["metadata"]["resourceVersion"] = "77"
    assert not await second._try() and second.holder == "a person"


async def test_an_operator_that_is_merely_busy_keeps_its_lease() -> None:
    server, fenced = LeaseServer(), []
    timing = Timing(duration=2.0, deadline=1.0, retry=0.1)
    busy = LeaderElector(cast(Cluster, server), "ns", "lease", holder_identity="busy", timing=timing, fence=fenced.append)
    async with LoopThread.start("lease") as aside:
        await aside.run(busy.acquire())
        keeping = asyncio.create_task(aside.run(busy.renew_forever()))
        await asyncio.sleep(0)
        end = time.monotonic() + 1.5
        while time.monotonic() < end:  # a pass that never lets go of this loop, nor of the interpreter
            pass
        assert busy.leading and busy.check() > 0 and not fenced
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
        await aside.run(busy.release())
        assert not busy.leading and server.held is not None and not server.held["spec"]["holderIdentity"]


async def test_an_error_in_the_thread_is_raised_in_the_caller() -> None:
    class Refusing(LeaseServer):
        async def get(self, kind: Kind, namespace: str, name: str) -> dict[str, Any] | None:
            raise ApiError(403, "no right to leases")

    async with LoopThread.start("lease") as aside:
        with pytest.raises(ApiError, match="no right"):
            await aside.run(LeaderElector(cast(Cluster, Refusing()), "ns", "lease").acquire())


async def test_a_machine_that_was_suspended_has_lost_its_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    first = LeaderElector(cast(Cluster, LeaseServer()), "ns", "lease", holder_identity="first", fence=fence)
    await first.acquire()
    assert first.leading
    of_the_system = time.clock_gettime  # time.monotonic does not know of the eleven seconds
    monkeypatch.setattr(time, "clock_gettime", lambda clock: of_the_system(clock) + 11)
    with pytest.raises(Fenced):
        first.check()


CONNECTIONS = 100  # of one client


class Occupied:
    """An API server that answers only when the test lets it. `heard`: methods of the requests whose first bytes have arrived."""

    def __init__(self) -> None:
        self.heard: Counter[str] = Counter()
        self.all_wait, self.may_answer = asyncio.Event(), asyncio.Event()

    async def talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            self.heard[line.split()[0].decode()] += 1
            if self.heard["GET"] == CONNECTIONS:
                self.all_wait.set()
            await reader.readuntil(b"\r\n\r\n")
            await self.may_answer.wait()
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}")
        writer.close()


@asynccontextmanager
async def occupied(folder: Path, authorize_write: Callable[[], float]) -> AsyncIterator[tuple[Occupied, Cluster, list[asyncio.Task[Any]]]]:
    """A client all of whose connections wait for answers: to the reads that are returned."""
    server = Occupied()
    async with await asyncio.start_server(server.talk, "127.0.0.1") as listening:
        url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        config = {"clusters": [{"name": "c", "cluster": {"server": url}}], "users": [{"name": "u", "user": {}}]}
        contexts = [{"name": "x", "context": {"cluster": "c", "user": "u"}}]
        (folder / "kubeconfig").write_text(json.dumps({**config, "contexts": contexts, "current-context": "x"}))
        async with Cluster.connect(str(folder / "kubeconfig"), authorize_write) as cluster:
            reads = [asyncio.create_task(cluster.get(PODS, "ns", f"pod-{number}")) for number in range(CONNECTIONS)]
            await server.all_wait.wait()
            yield server, cluster, reads


@pytest.mark.parametrize("slept", [1, 11])
async def test_a_write_that_had_to_wait_for_a_connection_asks_again_before_its_first_byte(slept: float, tmp_path: Path) -> None:
    clock = Clock()
    leader = elector(LeaseServer(), clock, "leader")
    await leader.acquire()
    asked: list[float] = []
    made = asyncio.Event()

    def authorize_write() -> float:
        asked.append(clock.now)
        made.set()
        return leader.check()

    async with occupied(tmp_path, authorize_write) as (server, cluster, reads):
        writing = asyncio.create_task(cluster.merge(PODS, "ns", "pod", {"metadata": {}}))
        await made.wait()
        for _ in range(10):  # it stands in line
            await asyncio.sleep(0)
        assert not server.heard["PATCH"] and not writing.done()
        clock.now += slept
        server.may_answer.set()
        assert await asyncio.gather(*reads) == [{}] * len(reads)
        if slept < 10:
            assert await writing == {} and len(asked) == 2
        else:
            with pytest.raises(BaseException):  # noqa: B017  in the operator nothing comes after the fence
                await writing
        assert server.heard["PATCH"] == (slept < 10)


@dataclass
class Process:
    """A real operator; its name is that of its user in the audit log."""

    name: str
    running: subprocess.Popen[bytes]
    log: Path

    @property
    def state(self) -> dict[str, Any]:
        port = eventually(lambda: re.search(r"health on port (\d+)", self.log.read_text()), within=30).group(1)
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=5) as answer:
                return dict(json.load(answer))
        except urllib.error.HTTPError as error:
            return dict(json.load(error))

    def leads(self) -> bool:
        return bool(self.state["ready"] and self.state["leading"])


Start = Callable[[str], Process]


@pytest.fixture
def start(server: apiserver.ApiServer, namespace: str, tmp_path: Path) -> Iterator[Start]:
    started: list[subprocess.Popen[bytes]] = []

    def one(user: str, *flags: str) -> Process:
        log = tmp_path / f"{user}.{len(started)}.log"
        scope = [f"--namespaces={namespace}", f"--lease-namespace={namespace}", "--health-port=0"]
        arguments = [*COMMAND, *FLAGS, *scope, f"--kubeconfig={server.kubeconfig_of(user, tmp_path)}", *flags]
        with log.open("wb") as out:
            started.append(subprocess.Popen(arguments, stdout=out, stderr=out, env=environment()))
        return Process(user, started[-1], log)

    yield one
    for process in started:
        process.kill()
        process.wait()


@contextmanager
def within(seconds: float) -> Iterator[None]:
    began = time.monotonic()
    yield
    took = time.monotonic() - began
    print(f"took {took:.1f} s")
    assert took < seconds


def children_written(server: apiserver.ApiServer, namespace: str, user: str) -> int:
    """Writes in this namespace, without those of the lease."""
    mine = (event["objectRef"] for event in server.writes(user) if event["objectRef"].get("namespace") == namespace)
    return sum(reference["resource"] != "leases" for reference in mine)


def test_one_acts_and_the_other_takes_over(server: apiserver.ApiServer, namespace: str, start: Start) -> None:
    """The first leader sleeps past its lease: for the others as one that was killed. When it wakes it ends, and writes nothing."""
    first = start("operator-a")
    eventually(first.leads, within=30)
    before = len(server.writes("operator-b"))  # of other tests, on the same server
    second = start("operator-b")
    eventually(lambda: second.state["ready"], within=30)
    assert not second.state["leading"] and second.state["holder"] == first.state["holder"]
    cluster = Namespace(server, namespace)
    cluster.create()
    # A request that is on its way when the process goes to sleep cannot be called back: the last ones are the status and its Events.
    eventually(cluster.ready)
    eventually(lambda: server.get(f"/apis/events.k8s.io/v1/namespaces/{namespace}/events")["items"])
    assert children_written(server, namespace, "operator-a")
    assert len(server.writes("operator-b")) == before, "a standby writes nothing"

    os.kill(first.running.pid, signal.SIGSTOP)
    try:
        with within(20):
            cluster.patch("inferenceservices", "qwen", {"spec": {"replicas": 3}})
            eventually(lambda: cluster.get("deployments", "qwen-worker")["spec"]["replicas"] == 3, within=25)
        assert second.leads()
        # Work that the sleeper, had it a say, would do as soon as it wakes: it has seen none of this.
        for count in range(5):
            cluster.patch("inferenceservices", "qwen", {"spec": {"replicas": count}})
            cluster.patch("deployments", "qwen-router", {"spec": {"replicas": 7 + count}})
        before = len(server.writes("operator-a"))
    finally:
        os.kill(first.running.pid, signal.SIGCONT)
    assert first.running.wait(timeout=10) == EXIT_FENCED and "ending: " in first.log.read_text(), first.log.read_text()
    late = [(event["verb"], event["requestURI"], event["responseStatus"]["code"]) for event in server.writes("operator-a")[before:]]
    assert not late, first.log.read_text()

    third = start("operator-a")
    eventually(lambda: third.state["ready"], within=30)
    second.running.send_signal(signal.SIGTERM)
    with within(8):
        cluster.patch("inferenceservices", "qwen", {"spec": {"replicas": 6}})
        eventually(lambda: cluster.get("deployments", "qwen-worker")["spec"]["replicas"] == 6, within=25)
    assert second.running.wait(timeout=15) == 0 and "has released the lease" in second.log.read_text()
    lease = server.get(f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases/fairlead-operator")
    assert lease["spec"]["leaseTransitions"] == 3 and lease["spec"]["holderIdentity"] == third.state["holder"]
