"""What a restart of the operator costs the API server: N services, an operator that has settled, and then a new process.

A real kube-apiserver on etcd, no nodes. Counts the writes of the new process (from the audit log, without its lease and events), and the
seconds from its start to the last write and until an edit that was made while no operator ran is applied.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.operator import apiserver
from tests.operator.conftest import await_crd
from tests.operator.manifests import manifest

from fairlead_operator.api.crd import custom_resource_definition

QUIET = 5.0  # seconds without a write: it has settled
SERVICES = "/apis/fairlead.dev/v1alpha1/namespaces/default/inferenceservices"


def writes(server: apiserver.ApiServer, user: str) -> list[dict[str, Any]]:
    return [event for event in server.writes(user) if event["objectRef"]["resource"] not in ("leases", "events")]


def until_quiet(server: apiserver.ApiServer, user: str, least: int = 0) -> int:
    seen, since = -1, time.monotonic()
    while time.monotonic() - since < QUIET or seen < least:
        now = len(writes(server, user))
        if now != seen:
            seen, since = now, time.monotonic()
        time.sleep(0.5)
    return seen


def until(look: Callable[[], bool], seconds: float = 300) -> None:
    deadline = time.monotonic() + seconds
    while not look():
        if time.monotonic() > deadline:
            raise SystemExit(f"not within {seconds} s")
        time.sleep(0.02)


def start(server: apiserver.ApiServer, user: str, folder: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "fairlead_operator.main", "--worker-image=w:1", "--router-image=r:1", "--health-port=0"]
    command.append(f"--kubeconfig={server.kubeconfig_of(user, folder)}")
    with (folder / f"{user}.log").open("wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})


def stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    process.wait(timeout=60)


def measure(server: apiserver.ApiServer, count: int, folder: Path) -> dict[str, Any]:
    for number in range(count):
        server.create(SERVICES, manifest(f"s{number}"))
    began = time.monotonic()
    first = start(server, "operator-a", folder)
    made = until_quiet(server, "operator-a", least=count)
    created = time.monotonic() - began - QUIET
    stop(first)
    # An edit before the start is applied by the pass that every service gets: the last service's is the time to having seen them all.
    edit = {"spec": {"replicas": 2}}
    code, _ = server.request("PATCH", f"{SERVICES}/s{count - 1}", edit, "application/merge-patch+json")
    assert code == 200
    began = time.monotonic()
    second = start(server, "operator-b", folder)
    path = f"/apis/apps/v1/namespaces/default/deployments/s{count - 1}-worker"
    until(lambda: server.get(path)["spec"]["replicas"] == 2)
    edited = time.monotonic() - began
    again = until_quiet(server, "operator-b")
    settled = time.monotonic() - began - QUIET
    stop(second)
    return {
        "services": count,
        "writes_to_create": made,
        "seconds_to_create": round(created, 1),
        "writes_after_restart": again,  # the one edit's own are among them: its Deployment and its status
        "seconds_from_restart_to_last_write": round(settled, 1),
        "seconds_from_restart_to_the_edit_applied": round(edited, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--services", type=int, default=200)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with apiserver.running() as server, tempfile.TemporaryDirectory() as folder:
        server.create("/apis/apiextensions.k8s.io/v1/customresourcedefinitions", custom_resource_definition())
        await_crd(server)
        found = measure(server, options.services, Path(folder))
    for key, value in found.items():
        print(f"{key.replace('_', ' '):44} {value}")
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
