"""Events on services. A repeated Event increases the count of its series.

An Event's name is a digest of its service and its text, so a repetition finds the first Event and updates it, even after a restart of the
operator. kopf, and any client without state, would post another one. While a service flaps, each Event is written once a minute.
"""

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections import OrderedDict
from datetime import UTC, datetime
from typing import Any

from fairlead_operator import names
from fairlead_operator.kube.client import ApiError, Cluster
from fairlead_operator.kube.kinds import EVENTS
from fairlead_operator.objects import Body

log = logging.getLogger(__name__)
MIN_INTERVAL = 60.0  # seconds between two writes of one Event
MAX_TRACKED = 4096  # Events whose last write is remembered; the API server knows the others
MAX_QUEUED = 10_000  # Events that wait for the API server; more are dropped, and logged
ATTEMPTS = 3
MAX_NOTE = 1024


class EventRecorder:
    """`record` returns immediately and never fails: Events inform people, and nothing depends on them."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._instance = f"{names.FIELD_MANAGER}-{socket.gethostname()}-{os.getpid()}"[:128]
        self._queue: asyncio.Queue[dict[str, Any]] = asyncio.Queue(MAX_QUEUED)
        self._written: OrderedDict[str, tuple[float, int]] = OrderedDict()  # name → time of the last write, repetitions since then
        self._task: asyncio.Task[None] | None = None

    def record(self, body: Body, type_: str, reason: str, message: str) -> None:
        """Queue an Event. `type_`: Normal or Warning."""
        event = build_event(body, type_, reason, message, self._instance, datetime.now(UTC))
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="Events")
        try:
            self._queue.put_nowait(event)
        except asyncio.QueueFull:
            log.warning("%s: no Event for %s: too many wait", event["metadata"]["name"], reason)

    async def close(self) -> None:
        """Stop, and drop the queued Events."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None

    async def _run(self) -> None:
        while True:
            event = await self._queue.get()
            name = event["metadata"]["name"]
            at, unrecorded = self._written.get(name, (-MIN_INTERVAL, 0))
            if time.monotonic() - at < MIN_INTERVAL:
                self._written[name] = at, unrecorded + 1
                continue
            if await self._write_with_retries(event, unrecorded + 1):
                self._written[name] = time.monotonic(), 0
                self._written.move_to_end(name)
                while len(self._written) > MAX_TRACKED:
                    self._written.popitem(last=False)

    async def _write_with_retries(self, event: dict[str, Any], times: int) -> bool:
        for attempt in range(ATTEMPTS):
            try:
                await self._write(event, times)
                return True
            except Exception as error:  # any error: a lost Event is worth no more than a log line
                last = attempt + 1 == ATTEMPTS or (isinstance(error, ApiError) and error.permanent)
                log.log(logging.WARNING if last else logging.DEBUG, "Event %s: %s: %s", event["reason"], type(error).__name__, error)
                if last:
                    return False
            await asyncio.sleep(2.0**attempt)
        return False

    async def _write(self, event: dict[str, Any], times: int) -> None:
        try:
            await self._cluster.create(EVENTS, event)
            return
        except ApiError as refusal:
            if refusal.code != 409:
                raise
        namespace, name = event["metadata"]["namespace"], event["metadata"]["name"]
        known = await self._cluster.get(EVENTS, namespace, name)
        if known is None:  # expired between the two requests
            await self._cluster.create(EVENTS, event)
            return
        count = int((known.get("series") or {}).get("count") or 1) + times
        await self._cluster.merge(EVENTS, namespace, name, {"series": {"count": count, "lastObservedTime": event["eventTime"]}})


def build_event(body: Body, type_: str, reason: str, message: str, instance: str, now: datetime) -> dict[str, Any]:
    """Return an Event of events.k8s.io/v1 on `body`. Equal texts give equal names."""
    metadata = body["metadata"]
    name = f"{metadata['name']}.{names.digest([metadata['uid'], type_, reason, message])}"
    return {
        "apiVersion": EVENTS.api_version,
        "kind": EVENTS.kind,
        "metadata": {"name": name, "namespace": metadata["namespace"]},
        "eventTime": now.strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
        "reportingController": f"fairlead.dev/{names.FIELD_MANAGER}",
        "reportingInstance": instance,
        "action": "Observed",
        "reason": reason[:128],
        "type": type_,
        "note": message if len(message) <= MAX_NOTE else message[: MAX_NOTE - 1] + "…",
        "regarding": {
            "apiVersion": body["apiVersion"],
            "kind": body["kind"],
            "namespace": metadata["namespace"],
            "name": metadata["name"],
            "uid": metadata["uid"],
            "resourceVersion": metadata.get("resourceVersion", ""),
        },
    }
