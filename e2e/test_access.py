"""`spec.access`: a request without a key is refused, and tenants share no cache."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.service import Service
from e2e.system import System, eventually, read_result

PROMPT = "The minutes of the board meeting, which must stay secret. " * 8


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, str]:
    """Create keys for two tenants with the command line. The key file is keys.yaml in the same folder."""
    created = {}
    for tenant in ("acme", "globex"):
        new = [sys.executable, "-m", "fairlead", "keys", "new", "-f", str(tmp_path / "keys.yaml"), tenant]
        created[tenant] = subprocess.run(new, check=True, capture_output=True, text=True).stdout.strip()
    return created


@pytest.fixture
def service(installed: System, keys: dict[str, str], tmp_path: Path) -> Iterator[Service]:
    """One worker, so that both tenants use the same cache."""
    service = Service(installed, "guarded")
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "guarded-keys", "namespace": installed.models}}
    installed.apply({**secret, "stringData": {"keys.yaml": (tmp_path / "keys.yaml").read_text()}})
    try:
        with service.deleted_afterwards():
            installed.apply(service.manifest(access={"keysSecretRef": {"name": "guarded-keys"}}, routing={"replicas": 1}))
            yield service
    finally:
        installed.cluster.kubectl("delete", "secret", "guarded-keys", "-n", installed.models)


def test_keys_are_required_and_tenants_share_no_cache(service: Service, keys: dict[str, str]) -> None:
    service.wait_ready(replicas=1)
    client = service.system.client("tenants.py", service.url, service.name, PROMPT, "fl-unknown", keys["acme"], keys["globex"])
    refused, _, acme, acme_again, globex, globex_again = read_result(client, seconds=60)
    assert refused["status"] == 401
    assert [one["status"] for one in (acme, acme_again, globex, globex_again)] == [200] * 4
    assert acme["cached"] == globex["cached"] == 0, "globex sends the prompt that acme has just sent"
    assert acme_again["cached"] > 0.8 * acme["prompt"] and globex_again["cached"] > 0.8 * globex["prompt"]
    eventually(lambda: service.status().get("index", {}).get("state") == "Available", 45, "the index, as a router sees it, in the status")
