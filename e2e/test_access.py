"""`spec.access`: a request without a key is refused, and tenants share nothing, not even the count of cached prompt tokens."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.service import Service
from e2e.system import System, eventually, finished

PROMPT = "The minutes of the board meeting, which must stay secret. " * 8


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, str]:
    """Two tenants' keys, made as a user makes them; their key file lies beside."""
    made = {}
    for tenant in ("acme", "globex"):
        new = [sys.executable, "-m", "fairlead", "keys", "new", "-f", str(tmp_path / "keys.yaml"), tenant]
        made[tenant] = subprocess.run(new, check=True, capture_output=True, text=True).stdout.strip()
    return made


@pytest.fixture
def service(installed: System, keys: dict[str, str], tmp_path: Path) -> Iterator[Service]:
    """One worker, so that both tenants' prompts lie in the same cache."""
    service = Service(installed, "guarded")
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "guarded-keys", "namespace": installed.models}}
    installed.apply({**secret, "stringData": {"keys.yaml": (tmp_path / "keys.yaml").read_text()}})
    installed.apply(service.manifest(access={"keysSecretRef": {"name": "guarded-keys"}}, routing={"replicas": 1}))
    yield service
    service.delete()
    installed.cluster.kubectl("delete", "secret", "guarded-keys", "-n", installed.models)


def test_keys_are_asked_for_and_tenants_see_nothing_of_each_other(service: Service, keys: dict[str, str]) -> None:
    service.ready(replicas=1)
    client = service.system.client("tenants.py", service.url, service.name, PROMPT, "fl-nobody", keys["acme"], keys["globex"])
    refused, _, acme, acme_again, globex, globex_again = finished(client, seconds=60)
    assert refused["status"] == 401
    assert [one["status"] for one in (acme, acme_again, globex, globex_again)] == [200] * 4
    assert acme["cached"] == globex["cached"] == 0, "globex asks what acme has just been answered"
    assert acme_again["cached"] > 0.8 * acme["prompt"] and globex_again["cached"] > 0.8 * globex["prompt"]
    eventually(lambda: service.status().get("index", {}).get("state") == "Available", 45, "the index, as a router sees it, in the status")
