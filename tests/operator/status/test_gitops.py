"""What kstatus, and Argo CD's health check in the documentation, make of the conditions. The Lua runs in a real Redis."""

import json
import textwrap
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import redis
from tests.operator.support.manifests import SETTINGS, container, deployment, pod, service
from tests.servers.redis_server import RedisServer, binary

from fairlead_operator.api import ServiceStatus
from fairlead_operator.causes import Cause
from fairlead_operator.desired import desired
from fairlead_operator.observed import Observed, ProbeResult
from fairlead_operator.status import refused_spec

from .kstatus import compute_kstatus

PAGE = Path(__file__).parents[3] / "docs" / "operate" / "gitops.md"
NOW = datetime(2026, 1, 1, 12, 0, 0, tzinfo=UTC)
SERVING = {"worker": deployment("worker", 1), "router": deployment("router", 2)}
PROVEN = ProbeResult(1, True, "", 0, NOW.timestamp())
ZERO = {"minReplicas": 0, "maxReplicas": 3, "target": {"ttftMilliseconds": 2000}}


def status_of(observed: Observed, before: ServiceStatus | None = None, *, generation: int = 1, **spec: Any) -> ServiceStatus:
    status = before.model_dump(by_alias=True, mode="json") if before is not None else None
    return desired(service(status=status, generation=generation, **spec), observed, SETTINGS, NOW).status


def rolling() -> ServiceStatus:
    half = deployment("worker", 1, updated=1)
    half["status"]["replicas"] = 2
    return status_of(Observed({**SERVING, "worker": half}), status_of(Observed(SERVING, probe=PROVEN)), generation=2)


def crashed() -> ServiceStatus:
    broken = pod(containerStatuses=[container({"waiting": {"reason": "ErrImagePull", "message": "not found"}})])
    served = status_of(Observed(SERVING, probe=PROVEN))
    return status_of(Observed({**SERVING, "worker": deployment("worker", 1, ready=0)}, pods=(broken,)), served)


def refused() -> ServiceStatus:
    served = status_of(Observed(SERVING, probe=PROVEN)).model_dump(by_alias=True, mode="json")
    one = service(generation=2, status=served)
    return refused_spec.build_status(one, Cause("InvalidSpec", "spec.engine.dtype: must be", fault=True), Observed(SERVING), NOW)[0]


STATES: dict[str, tuple[ServiceStatus, int, str, str]] = {  # status, metadata.generation, kstatus, Argo CD's health
    "no operator has seen it": (ServiceStatus(observed_generation=-1), 1, "InProgress", "Progressing"),
    "serves": (status_of(Observed(SERVING, probe=PROVEN)), 1, "Current", "Healthy"),
    "edited": (status_of(Observed(SERVING, probe=PROVEN)), 2, "InProgress", "Progressing"),
    "starts": (status_of(Observed({**SERVING, "worker": deployment("worker", 1, ready=0)})), 1, "InProgress", "Progressing"),
    "rolls out": (rolling(), 2, "InProgress", "Progressing"),
    "asleep": (status_of(Observed({**SERVING, "worker": deployment("worker", 0)}), scaling=ZERO), 1, "Current", "Healthy"),
    "no worker is wanted": (status_of(Observed({**SERVING, "worker": deployment("worker", 0)}), replicas=0), 1, "InProgress", "Suspended"),
    "its worker crashed": (crashed(), 1, "InProgress", "Degraded"),
    "an edit is refused": (refused(), 2, "Failed", "Degraded"),
}


@pytest.fixture(scope="module")
def server() -> Iterator[redis.Redis]:
    if binary("6.2") is None:
        pytest.skip("no redis-server 6.2 on this machine: make redis-servers")
    with RedisServer("6.2") as running:
        yield redis.Redis(port=running.port)


def health_check() -> str:
    """Return the Lua of the page."""
    block = PAGE.read_text().split("fairlead.dev_InferenceService: |\n", 1)[1].split("```", 1)[0]
    return textwrap.dedent(block)


@pytest.mark.parametrize("state", STATES)
def test_gitops_tools_understand_the_conditions(state: str, server: redis.Redis) -> None:
    status, generation, wanted, healthy = STATES[state]
    written = status.model_dump(mode="json", by_alias=True, exclude_none=True)
    assert compute_kstatus(written, generation) == wanted
    body = {"metadata": {"generation": generation}, "status": written}
    check = f"local obj = cjson.decode(ARGV[1])\nlocal function check()\n{health_check()}\nend\nreturn cjson.encode(check())"
    health = json.loads(server.eval(check, 0, json.dumps(body)))
    assert health["status"] == healthy and health["message"], health
