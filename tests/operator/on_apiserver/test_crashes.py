"""The operator is killed with SIGKILL at one of its writes, and restarted: each step ends as it does without a kill.

A sample of the writes here; `make crash-matrix` kills at each of them, before and after the API server has it.
"""

import difflib
import json
import os
import re
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.operator.process.test_process import FLAGS, environment
from tests.operator.support import apiserver
from tests.operator.support.cluster import Cluster, eventually
from tests.operator.support.forked_operator import ForkedOperator
from tests.operator.support.killing_proxy import KillingProxy
from tests.operator.support.manifests import manifest

from fairlead_operator.names import FIELD_MANAGER, digest
from fairlead_operator.revisions import MAX_REVISIONS

CRASHES = os.environ.get("FAIRLEAD_CRASHES", "")  # "all", or "20-35": at these writes
SAMPLE = [(4, True), (10, False), (11, True), (-7, True)]  # (write, after); negative: counted from the last one
PLURALS = ("serviceaccounts", "services", "controllerrevisions", "deployments", "poddisruptionbudgets")
LANES = 4  # cases at the same time
LOOKS = 3  # of the operator at a state that is taken for its last: a pass may have begun before the write that was to wake it
SLOW = 90.0  # seconds for one step: a machine with much else to do

Step = Callable[[Cluster], None]


def _edit(**spec: Any) -> Step:
    return lambda cluster: cluster.patch("inferenceservices", "qwen", {"spec": spec})


STEPS: list[Step] = [
    lambda cluster: cluster.create(),
    *(_edit(engine={"args": [f"--edit={number}"]}) for number in range(MAX_REVISIONS)),  # the last one has the oldest revision deleted
    _edit(replicas=3),
    _edit(routing={"replicas": 1}, engine={"args": ["--edit=0"]}),  # back to a revision that is kept
]


@dataclass
class Case:
    """One namespace with one operator after the other; `states`: the objects at the end of each step."""

    cluster: Cluster
    folder: Path
    proxy: KillingProxy
    running: ForkedOperator | None = None
    starts: int = 0
    states: list[str] = field(default_factory=list)

    def start(self) -> None:
        self.starts += 1
        kubeconfig = json.loads(self.cluster.server.kubeconfig.read_text())
        kubeconfig["clusters"][0]["cluster"] = {"server": self.proxy.url}
        path = self.folder / "kubeconfig"
        path.write_text(json.dumps(kubeconfig))
        scope = [
            f"--namespaces={self.cluster.namespace}",
            f"--lease-namespace={self.cluster.namespace}",
            "--health-port=0",
            "--hub-endpoint=",
        ]
        self.running = ForkedOperator([*FLAGS, *scope, f"--kubeconfig={path}"], self.folder / f"log.{self.starts}", environment())
        self.proxy.pid = lambda: self.running.pid if self.running is not None else 0

    def revive(self) -> None:
        """Start the successor of a killed operator, without waiting 15 s until the lease expires."""
        assert self.running is not None
        if (code := self.running.poll()) is not None:
            assert code == -9, (self.folder / f"log.{self.starts}").read_text()
            self.proxy.arm(0, after=False)
            self.cluster.server.request(
                "DELETE", f"/apis/coordination.k8s.io/v1/namespaces/{self.cluster.namespace}/leases/fairlead-operator"
            )
            self.start()

    def settled(self) -> str:
        """Return the objects, once the status describes them; empty before."""
        self.revive()
        self._look()
        service = self.cluster.get("inferenceservices", "qwen")
        status = service.get("status") or {}
        if status.get("observedGeneration") != service["metadata"]["generation"]:
            return ""
        # `reducedSince` is a time, which a kill moves.
        timeless = {key: value for key, value in status.items() if key != "reducedSince"}
        found: dict[str, Any] = {"status": {**timeless, "conditions": [_timeless(one) for one in status["conditions"]]}}
        for plural in PLURALS:
            for body in self.cluster.server.get(self.cluster.path(plural))["items"]:
                found[f"{plural}/{body['metadata']['name']}"] = _comparable(body)
        text = json.dumps(found, sort_keys=True, indent=1)
        uid = service["metadata"]["uid"]
        return text.replace(uid, "UID").replace(digest(uid), "DIGEST").replace(self.cluster.namespace, "NAMESPACE")

    def _look(self) -> None:
        """Act as a Deployment controller without room for pods: on a busy machine a case takes longer than its grace."""
        for body in self.cluster.server.get(self.cluster.path("deployments"))["items"]:
            generation = body["metadata"]["generation"]
            if (body.get("status") or {}).get("observedGeneration") != generation:
                self.cluster.patch("deployments", body["metadata"]["name"], {"status": {"observedGeneration": generation}}, "status")

    def play(self, wanted: list[str] | None = None) -> None:
        """Run all steps. `wanted`: the states of a run without a kill."""
        self.start()
        for number, step in enumerate(STEPS):
            step(self.cluster)
            if wanted is None:
                self.states.append(eventually(self._steady, within=SLOW))
            else:
                try:
                    eventually(lambda number=number: self.settled() == wanted[number], within=SLOW)
                except AssertionError as error:
                    differs = difflib.unified_diff(wanted[number].splitlines(), self.settled().splitlines(), "not killed", "killed", n=1)
                    raise AssertionError(f"step {number} ends otherwise:\n" + "\n".join(differs)) from error

    def _steady(self) -> str:
        """Return a state that stayed the same in several reads, each after a write which changes nothing."""
        before, writes = self.settled(), len(self.proxy.writes)
        if not before:
            return ""
        for number in range(LOOKS):
            passes = self._passes()
            self.cluster.patch("deployments", "qwen-router", {"metadata": {"annotations": {"look": f"{writes}.{number}"}}})
            eventually(lambda passes=passes: self._passes() > passes, within=SLOW)
        return before if self.settled() == before and len(self.proxy.writes) == writes else ""

    def _passes(self) -> float:
        """Writes of the running operator."""
        port = re.search(r"health on port (\d+)", (self.folder / f"log.{self.starts}").read_text())
        assert port is not None, "it has written a status, and so it has said where its health is"
        with urllib.request.urlopen(f"http://127.0.0.1:{port[1]}/metrics", timeout=30) as answer:
            counted = re.search(r"^fairlead_operator_reconcile_seconds_count (\S+)", answer.read().decode(), re.MULTILINE)
        return float(counted[1]) if counted is not None else 0.0


def _timeless(condition: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in condition.items() if key != "lastTransitionTime"}


def _comparable(body: dict[str, Any]) -> dict[str, Any]:
    metadata = body["metadata"]
    spec = {key: value for key, value in (body.get("spec") or {}).items() if key not in ("clusterIP", "clusterIPs")}
    owners, labels = metadata.get("ownerReferences"), metadata.get("labels")
    managers = sorted({entry["manager"] for entry in metadata["managedFields"] if entry["manager"] == FIELD_MANAGER})
    return {"owners": owners, "labels": labels, "managers": managers, "spec": spec} | {key: body.get(key) for key in ("data", "revision")}


@contextmanager
def case(server: apiserver.ApiServer, folder: Path, name: str) -> Iterator[Case]:
    server.create("/api/v1/namespaces", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    (folder / name).mkdir()
    made = Case(Cluster(server, name), folder / name, KillingProxy(server.url))
    try:
        yield made
    finally:
        if made.running is not None:
            made.running.kill()
            made.running.wait()
        made.proxy.close()


def test_killed_at_any_write_it_ends_as_without_a_kill(server: apiserver.ApiServer, namespace: str, tmp_path: Path) -> None:
    with case(server, tmp_path, f"{namespace}-ref") as reference:
        reference.play()
    states, writes = reference.states, reference.proxy.writes
    assert ("DELETE", "controllerrevisions") in {(method, path.split("/")[-2]) for method, path in writes}, "a revision was one too many"
    count = len(writes)
    chosen = [(n % (count + 1), after) for n, after in SAMPLE]
    if CRASHES:
        first, _, last = CRASHES.partition("-") if CRASHES != "all" else ("1", "", "")
        chosen = [(n, after) for n in range(int(first), int(last or count) + 1) for after in (False, True)]

    def killed(write: int, after: bool) -> None:
        with case(server, tmp_path, f"{namespace}-{write}{'a' if after else 'b'}") as one:
            one.proxy.arm(write, after=after)
            one.play(states)
            # Writes that a killed process had not made may be fewer than those that were counted: then no kill happened. Killed at the
            # last one, it may just have been: what it had written is there.
            if len(one.proxy.writes) >= write:
                eventually(lambda: one.settled() == states[-1] and one.starts == 2, within=SLOW)
        print(f"killed {'after' if after else 'before'} write {write} of {count}: ends as without a kill", flush=True)

    with ThreadPoolExecutor(LANES) as lanes:
        cases = {one: lanes.submit(killed, *one) for one in chosen}
        failed = {one: error for one, case_ in cases.items() if (error := case_.exception()) is not None}
    words = "\n".join(f"killed {'after' if after else 'before'} write {write}: {error}" for (write, after), error in failed.items())
    assert not failed, f"{len(failed)} of {len(cases)} cases:\n{words}"


def test_a_service_deleted_while_no_operator_ran_leaves_nothing_behind(server: apiserver.ApiServer, namespace: str, tmp_path: Path) -> None:
    with case(server, tmp_path, f"{namespace}-gone") as one:
        one.proxy.arm(6, after=True)
        one.start()
        one.cluster.create()
        assert one.running is not None
        one.running.wait(timeout=SLOW)
        uid = one.cluster.get("inferenceservices", "qwen")["metadata"]["uid"]
        assert server.request("DELETE", one.cluster.path("inferenceservices", "qwen"))[0] == 200, "no finalizer holds it"
        one.revive()
        before = len(one.proxy.writes)
        server.create(one.cluster.path("inferenceservices"), manifest("later", one.cluster.namespace))
        eventually(lambda: (one.cluster.get("inferenceservices", "later").get("status") or {}).get("conditions"), within=SLOW)
        created = [path for _, path in one.proxy.writes[before:] if path.partition("?")[0].endswith("/secrets")]
        named = [path for _, path in one.proxy.writes[before:] if path not in created]
        assert len(created) <= 1 and all("later" in path for path in named), "nothing is done for a service that is gone"
        for plural in PLURALS:
            for body in server.get(one.cluster.path(plural))["items"]:
                metadata = body["metadata"]
                if metadata["name"].startswith("qwen"):  # what Kubernetes' garbage collector needs to remove them
                    assert [(owner["uid"], owner["controller"]) for owner in metadata["ownerReferences"]] == [(uid, True)]
