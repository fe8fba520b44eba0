"""Events: read only for pods that do not start, the one that names the cause, and an API server that refuses ours."""

import asyncio
from typing import Any, cast

import aiohttp
import pytest
from tests.operator.support.manifests import container, pod

from fairlead_operator.causes.events import newest_relevant
from fairlead_operator.kube import event_recorder as event_recorder
from fairlead_operator.kube.client import ApiError, Cluster
from fairlead_operator.kube.event_recorder import EventRecorder
from fairlead_operator.objects import has_no_pod
from fairlead_operator.observed import PodEvent
from fairlead_operator.polling import periodic as repeated
from fairlead_operator.polling import pod_events
from fairlead_operator.polling.pod_events import PodEventPoller, is_stuck

BOUND = {"type": "PodScheduled", "status": "True"}
ENDED = {"exitCode": 137, "reason": "Error"}
CREATING = {"conditions": [BOUND], "containerStatuses": [container({"waiting": {"reason": "ContainerCreating"}})]}


@pytest.mark.parametrize(
    ("status", "asked"),
    [
        (CREATING, True),
        ({"conditions": [BOUND]}, True),
        ({"containerStatuses": [container({"terminated": ENDED}, restartCount=1)]}, True),
        ({"containerStatuses": [container({"running": {}}, {"terminated": ENDED}, started=False)]}, True),
        ({"containerStatuses": [container({"running": {}}, started=True)]}, True),
        ({"conditions": [{"type": "Ready", "status": "True"}]}, False),
        ({"conditions": [{"type": "PodScheduled", "status": "False"}]}, False),
        ({"containerStatuses": [container({"running": {}}, started=False)]}, False),
        ({"containerStatuses": [container({"waiting": {"reason": "ImagePullBackOff"}})]}, False),
        ({"containerStatuses": [container({"terminated": {"exitCode": 1}})]}, False),
        ({"phase": "Failed", "reason": "Evicted"}, False),
    ],
)
def test_only_stuck_pods_without_a_cause_are_polled(status: dict[str, Any], asked: bool) -> None:
    assert is_stuck(pod(**status)) is asked


@pytest.mark.parametrize(("status", "asked"), [({}, True), ({"active": 1}, False), ({"succeeded": 1}, False), ({"failed": 1}, False)])
def test_a_job_is_polled_while_it_has_no_pod(status: dict[str, Any], asked: bool) -> None:
    assert has_no_pod({"status": status}) is asked


def test_the_newest_telling_event_counts_and_readiness_last() -> None:
    def event(reason: str, message: str, time: str, **more: Any) -> dict[str, Any]:
        return {"reason": reason, "message": message, "lastTimestamp": time, **more}

    mount, later = event("FailedMount", "a", "2026-01-01T00:00:00Z"), event("FailedMount", "b", "2026-01-01T00:01:00Z")
    assert newest_relevant([later, mount, event("Pulled", "c", "2026-01-01T00:09:00Z")]) == PodEvent("FailedMount", "b")
    series = event("FailedMount", "d", "", series={"lastObservedTime": "2026-01-01T00:02:00.000000Z"})
    assert newest_relevant([later, series]) == PodEvent("FailedMount", "d")
    live, ready = event("Unhealthy", "Liveness probe failed", "1"), event("Unhealthy", "Readiness probe failed", "2")
    assert newest_relevant([live, ready]) == PodEvent("Unhealthy", "Liveness probe failed") and newest_relevant([]) is None


class Server:
    """Answers as the test sets; counts the requests."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.events: list[dict[str, Any]] = []
        self.refusals: list[ApiError] = []
        self.made: dict[str, Any] = {}
        self.merged: list[Any] = []
        self.quiet = asyncio.Event()

    async def events_of(self, kind: str, namespace: str, name: str) -> list[dict[str, Any]]:
        self.asked.append(name)
        return self.events

    async def create(self, kind: Any, body: dict[str, Any]) -> dict[str, Any]:
        if self.refusals:
            raise self.refusals.pop(0)
        name = body["metadata"]["name"]
        if name in self.made:
            raise ApiError(409, "exists")
        self.made[name] = body
        self.quiet.set()
        return body

    async def get(self, kind: Any, namespace: str, name: str) -> Any:
        return self.made.get(name)

    async def merge(self, kind: Any, namespace: str, name: str, patch: Any) -> Any:
        self.made[name] = {**self.made[name], **patch}
        self.merged.append(patch)
        self.quiet.set()


async def test_a_stuck_pod_is_polled_while_it_is_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pod_events, "STUCK_AFTER", 0.0)
    monkeypatch.setattr(pod_events, "PERIOD", 0.0)
    server, told = Server(), asyncio.Event()
    server.events = [{"reason": "FailedMount", "message": "x", "lastTimestamp": "1"}]
    watch = PodEventPoller(cast(Cluster, server), told.set)
    well, stuck = pod("well", conditions=[{"type": "Ready", "status": "True"}]), [pod(f"stuck-{number}", **CREATING) for number in range(5)]
    for one in (well, *stuck):
        one["metadata"]["namespace"] = "default"
    watch.follow([well])
    await asyncio.sleep(0)
    assert not server.asked, "a service that is well costs nothing"
    watch.follow([well, *stuck])
    await asyncio.wait_for(told.wait(), 10)
    assert set(watch.seen) == {"stuck-0", "stuck-1", "stuck-2"}, "told once, after all were asked about"
    assert set(server.asked) == {"stuck-0", "stuck-1", "stuck-2"}, "a few speak for all"
    watch.follow([well])
    assert watch.seen == {}


def said(event_recorder: EventRecorder, message: str) -> None:
    metadata = {"name": "qwen", "namespace": "default", "uid": "u", "resourceVersion": "1"}
    event_recorder.record(
        {"apiVersion": "fairlead.dev/v1alpha1", "kind": "InferenceService", "metadata": metadata}, "Warning", "Crashed", message
    )


async def test_an_event_that_is_refused_is_given_up_and_the_next_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_recorder, "MIN_INTERVAL", 0.0)
    server = Server()
    made = EventRecorder(cast(Cluster, server))
    server.refusals = [ApiError(403, "events is forbidden")]
    said(made, "a")
    said(made, "b")
    await asyncio.wait_for(server.quiet.wait(), 10)
    assert [event["note"] for event in server.made.values()] == ["b"]
    server.quiet.clear()
    said(made, "b")
    await asyncio.wait_for(server.quiet.wait(), 10)
    assert [patch["series"]["count"] for patch in server.merged] == [2]
    await made.close()


async def test_repetitions_within_a_minute_are_counted_and_not_written() -> None:
    server = Server()
    made = EventRecorder(cast(Cluster, server))
    for _ in range(5):
        said(made, "a")
    said(made, "b")
    while len(server.made) < 2:
        await asyncio.wait_for(server.quiet.wait(), 10)
        server.quiet.clear()
    assert len(server.made) == 2 and server.merged == [], "four more of the first are told with its next write"
    await made.close()


class Breaking(Server):
    """Ends the first connection without an answer."""

    async def events_of(self, kind: str, namespace: str, name: str) -> list[dict[str, Any]]:
        if not self.asked:
            self.asked.append(name)
            raise aiohttp.ServerDisconnectedError
        return await super().events_of(kind, namespace, name)


async def test_a_broken_connection_does_not_end_the_polls(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """aiohttp's ServerDisconnectedError is no OSError: an API server that restarts is one."""
    monkeypatch.setattr(pod_events, "STUCK_AFTER", 0.0)
    monkeypatch.setattr(repeated, "RETRY", 0.0)
    server, told = Breaking(), asyncio.Event()
    server.events = [{"reason": "FailedMount", "message": "x", "lastTimestamp": "1"}]
    watch = PodEventPoller(cast(Cluster, server), told.set)
    stuck = pod("stuck", **CREATING)
    stuck["metadata"]["namespace"] = "default"
    watch.follow([stuck])
    await asyncio.wait_for(told.wait(), 10)
    assert set(watch.seen) == {"stuck"} and "events of stuck" in caplog.text and "ServerDisconnectedError" in caplog.text
    watch.stop()
