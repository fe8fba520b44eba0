"""A new revision on a part of the requests: promoted, rolled back, taken back, replaced by a newer one; the old pods are not touched by any
of it, and an operator may end at every step. The operator's own code, on the simulated cluster.
"""

import json
import random
from typing import Any

import pytest
from tests.operator.simulated.api import Body
from tests.operator.simulated.cluster import SERVICE, WORKER, Cluster
from tests.operator.simulated.deployments import ReplicaSet
from tests.operator.support.manifests import SETTINGS, service

from fairlead_common.canary_split import Durations, Side, SplitReport
from fairlead_operator.children import router
from fairlead_operator.names import CANARY_FAILED
from fairlead_operator.observed import Observed, ObservedCanary
from fairlead_operator.revisions import router_revision, worker_revision

CANARY, CONFIG = ("Deployment", "qwen-worker-canary"), ("ConfigMap", "qwen-split")
ASKED = {"trafficPercent": 20, "analysisSeconds": 60, "minRequests": 50}


def side(requests: int, errors: int = 0, ttft: float = 0.1) -> Side:
    times = Durations()
    for _ in range(min(requests - errors, 20)):
        times.add(ttft)
    return Side(requests, errors, times)


class Trial(Cluster):
    """With the controller of a Deployment that is recreated, and routers that count (ten requests a second of the canary, 40 others)."""

    def __init__(self, chance: random.Random, asked: Any = ASKED, **spec: Any) -> None:
        super().__init__(chance, [4, 4])
        self.error_rate, self.ttft, self.traffic = 0.0, 0.1, True
        self._told, self._since = ("", ""), 0.0
        self.operator.canary = self._seen
        self.create(**{"replicas": 2, "engine": {"maxNumSeqs": 1}, "rollout": {"canary": asked, "progressDeadlineSeconds": 120}, **spec})

    def restart_operator(self, **settings: Any) -> None:
        super().restart_operator(**settings)
        self.operator.canary = self._seen

    @property
    def phase(self) -> str:
        return str((self.api.objects[SERVICE].get("status") or {}).get("canary", {}).get("phase", ""))

    @property
    def split(self) -> dict[str, Any]:
        return dict(json.loads(self.api.objects[CONFIG]["data"]["split.json"]))

    def stable(self) -> set[str]:
        return {pod["metadata"]["name"] for pod in self.workers()}

    def running(self) -> str:
        return revision_of(self.api.objects[WORKER])

    def until(self, phase: str, seconds: float = 900.0) -> None:
        self.run(seconds, until=lambda: self.phase == phase)
        assert self.phase == phase, (self.phase, self.condition("Ready"))

    def settle(self) -> None:
        self.run(1500.0, until=lambda: self.complete and CANARY not in self.api.objects)
        assert self.complete and CANARY not in self.api.objects, (self.phase, self.condition("Ready"), self.condition("Progressing"))

    def _seen(self) -> ObservedCanary | None:
        """As routers that know of a split since the ConfigMap says so."""
        told = self.split if CONFIG in self.api.objects else {}
        if (told.get("revision", ""), told.get("trial", "")) != self._told:
            self._told, self._since = (told.get("revision", ""), told.get("trial", "")), self.api.now
        if not self._told[0] or not self.traffic:
            return None
        seconds = int(self.api.now - self._since)
        canary = side(10 * seconds, round(10 * seconds * self.error_rate), self.ttft)
        return ObservedCanary(SplitReport(self._told[0], told["weight"], self._told[1], canary, side(40 * seconds)), 2)

    def _sync(self) -> None:
        super()._sync()
        deployment = self.api.objects.get(CANARY)
        if deployment is None:
            return
        template = deployment["spec"]["template"]
        mine = [one for one in self.controller.sets if one.deployment == CANARY[1]]
        for one in mine:
            one.replicas = one.replicas if one.template == template else 0
        if not any(pod["sim"].set in mine and pod["sim"].set.template != template for pod in self.api.of("Pod")):
            new = next((one for one in mine if one.template == template), None)
            if new is None:
                new = ReplicaSet(CANARY[1], json.loads(json.dumps(template)), 100 + len(self.controller.sets))
                self.controller.sets.append(new)
            new.replicas = deployment["spec"]["replicas"]
        self.controller.sync_sets(CANARY[1])
        self._write(deployment, [one for one in self.controller.sets if one.deployment == CANARY[1]])

    def _write(self, deployment: Body, sets: list[ReplicaSet]) -> None:
        now, wanted = sum(one.available for one in sets), deployment["spec"]["replicas"]
        truth = "True" if now >= wanted else "False"
        held = next(iter((deployment.get("status") or {}).get("conditions", [])), {})
        since = held["lastTransitionTime"] if held.get("status") == truth else self.api.time()
        status = {"observedGeneration": deployment["metadata"]["generation"], "availableReplicas": now, "readyReplicas": now}
        status["conditions"] = [{"type": "Available", "status": truth, "lastTransitionTime": since}]
        if status != deployment.get("status"):
            deployment["status"] = status
            self.api.put(deployment)


def revision_of(deployment: Body) -> str:
    return str(deployment["spec"]["template"]["metadata"]["labels"]["fairlead.dev/revision"])


def begun(seed: int = 1, asked: Any = ASKED, **spec: Any) -> Trial:
    cluster = Trial(random.Random(seed), asked, **spec)
    cluster.settle()
    return cluster


def failure(cluster: Trial, revision: str) -> str:
    return str(
        cluster.api.objects["ControllerRevision", f"qwen-worker-{revision}"]["metadata"].get("annotations", {}).get(CANARY_FAILED, "")
    )


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("restarting", [0.0, 0.3])
def test_a_good_canary_is_promoted_after_its_pause_and_not_before(seed: int, restarting: float) -> None:
    """Independent of the operator's memory: with `restarting`, it is a new process every third second."""
    cluster = begun(seed)
    old, before = cluster.running(), cluster.stable()
    assert CANARY not in cluster.api.objects and cluster.split == {}, "no canary of a first revision"
    cluster.edit(engine={"maxNumSeqs": 2})
    judged_at = 0.0
    for _ in range(600):
        cluster.run(1.0)
        if cluster.chance.random() < restarting:
            cluster.restart_operator()
        if cluster.phase == "Analyzing" and not judged_at:
            judged_at = cluster.api.now
        if cluster.running() != old:
            break
        assert cluster.stable() == before, "no pod of the old revision was touched"
    assert cluster.running() != old and 50 <= cluster.api.now - judged_at <= 90
    assert cluster.split["weight"] == 20 and revision_of(cluster.api.objects[CANARY]) == cluster.running(), "it serves on until all is done"
    cluster.settle()
    assert cluster.split == {} and not before & cluster.stable() and cluster.condition("Ready")["status"] == "True"


@pytest.mark.parametrize("restarting", [0.0, 0.3])
def test_a_failing_canary_is_rolled_back_at_once_and_stays_so(restarting: float) -> None:
    cluster = begun()
    old, before = cluster.running(), cluster.stable()
    cluster.error_rate = 0.3
    cluster.edit(engine={"maxNumSeqs": 2})
    for _ in range(150):
        cluster.run(1.0)
        if cluster.chance.random() < restarting:
            cluster.restart_operator()
        assert cluster.running() == old and cluster.stable() == before
    assert cluster.phase == "Failed" and CANARY not in cluster.api.objects and cluster.split == {}
    bad = cluster.api.objects[SERVICE]["status"]["canary"]["revision"]
    progressing, degraded, stalled = (cluster.condition(type_) for type_ in ("Progressing", "Degraded", "Stalled"))
    assert (progressing["status"], progressing["reason"]) == ("False", "CanaryFailed") and cluster.condition("Ready")["status"] == "True"
    assert (degraded["status"], degraded["reason"]) == ("True", "CanaryFailed") == (stalled["status"], stalled["reason"])
    assert "(30 %) failed, of the old revision 0 of" in progressing["message"] and "maxErrorRateIncrease" in progressing["message"]
    assert failure(cluster, bad) in progressing["message"] and cluster.condition("Available")["status"] == "True"
    assert "annotations" not in cluster.api.objects[SERVICE]["metadata"]
    written = len(cluster.api.writes)
    cluster.restart_operator()
    cluster.run(120.0)
    assert cluster.api.writes[written:] == [], "and nothing more is done"
    cluster.error_rate = 0.0
    assert "give spec.rollout.canary.retryToken another value" in progressing["message"]
    retry = {"canary": {**cluster.api.objects[SERVICE]["spec"]["rollout"]["canary"], "retryToken": "2026-01-01T00:00:00Z"}}
    cluster.edit(rollout=retry)
    cluster.settle()
    assert cluster.running() == bad, "tried again, as the message says, and better"


def test_a_retry_that_fails_is_not_tried_again_until_the_value_changes_again() -> None:
    cluster = begun()
    old = cluster.running()
    cluster.error_rate = 0.3
    cluster.edit(engine={"maxNumSeqs": 2})
    cluster.until("Failed")
    canary = cluster.api.objects[SERVICE]["spec"]["rollout"]["canary"]
    cluster.edit(rollout={"canary": {**canary, "retryToken": "1"}})
    cluster.run(60.0, until=lambda: cluster.phase == "Starting")
    assert CANARY in cluster.api.objects, "it is tried once more"
    cluster.until("Failed")
    cluster.run(120.0)  # until the canary's pods are gone, which status.revisions lists
    written = len(cluster.api.writes)
    cluster.restart_operator()
    cluster.run(120.0)
    assert cluster.api.writes[written:] == [] and cluster.running() == old
    cluster.edit(rollout={"canary": {**canary, "retryToken": "2"}})
    cluster.run(60.0, until=lambda: cluster.phase == "Starting")
    assert CANARY in cluster.api.objects


def test_what_was_rolled_back_stays_so_while_paused_and_when_the_main_deployment_is_deleted() -> None:
    cluster = begun()
    old, template = cluster.running(), cluster.api.objects[WORKER]["spec"]["template"]
    cluster.error_rate = 0.3
    cluster.edit(engine={"maxNumSeqs": 2})
    cluster.until("Failed")
    cluster.edit(rollout={"paused": True})
    cluster.run(20.0)
    cluster.edit(rollout={"paused": False})
    cluster.run(60.0)
    assert cluster.phase == "Failed" and cluster.running() == old
    cluster.api.remove(WORKER)
    cluster.run(60.0)
    assert cluster.phase == "Failed" and cluster.api.objects[WORKER]["spec"]["template"] == template


def test_a_slow_canary_is_rolled_back_when_its_time_is_over() -> None:
    cluster = begun()
    cluster.ttft = 0.3
    cluster.edit(engine={"maxNumSeqs": 2})
    cluster.until("Analyzing")
    cluster.run(50.0)
    assert cluster.phase == "Analyzing"
    cluster.until("Failed")
    assert (
        "p50 time to first token was" in cluster.condition("Progressing")["message"]
        and "maxTTFTIncrease" in cluster.condition("Progressing")["message"]
    )


def test_an_edit_that_is_taken_back_removes_the_canary_and_nothing_else() -> None:
    cluster = begun()
    before, old = cluster.stable(), cluster.running()
    cluster.edit(engine={"maxNumSeqs": 2})
    cluster.until("Analyzing")
    cluster.edit(engine={"maxNumSeqs": 1})
    cluster.settle()
    assert cluster.stable() == before and cluster.running() == old and cluster.split == {}


def test_a_newer_edit_replaces_the_canary_and_restarts_the_analysis() -> None:
    cluster = begun()
    before, old = cluster.stable(), cluster.running()
    for number in range(2, 10):  # more than revisions are kept
        cluster.edit(engine={"maxNumSeqs": number})
        cluster.run(25.0)
        assert cluster.running() == old and cluster.stable() == before
    newest = worker_revision(service(engine={"maxNumSeqs": 9}, replicas=2))
    cluster.run(300.0, until=lambda: cluster.phase == "Analyzing" and cluster.split["revision"] == newest)
    began = cluster.api.now
    cluster.run(900.0, until=lambda: cluster.running() != old)
    assert cluster.running() == newest and cluster.api.now - began > 45
    cluster.settle()


def test_going_back_in_the_middle_of_a_promotion_needs_no_canary() -> None:
    cluster = begun(replicas=4)
    old = cluster.running()
    cluster.edit(engine={"maxNumSeqs": 2})
    cluster.until("Promoting")
    cluster.run(200.0, until=lambda: any(revision_of({"spec": {"template": pod}}) != old for pod in cluster.workers()))
    cluster.edit(engine={"maxNumSeqs": 1})
    cluster.run(60.0, until=lambda: cluster.running() == old)
    assert cluster.running() == old
    cluster.settle()


def test_a_first_revision_that_never_served_is_corrected_at_once() -> None:
    cluster = Trial(random.Random(3), engine={"maxNumSeqs": 1, "args": ["--broken"]})
    cluster.run(120.0)
    cluster.edit(engine={"args": []})
    cluster.run(10.0)
    assert cluster.running() == worker_revision(service(engine={"maxNumSeqs": 1}, replicas=2)) and CANARY not in cluster.api.objects
    cluster.settle()


def test_a_canary_whose_pods_never_start_is_rolled_back_with_their_cause() -> None:
    cluster = begun()
    before = cluster.stable()
    cluster.edit(engine={"maxNumSeqs": 2, "args": ["--broken"]})
    cluster.run(120.0, until=lambda: cluster.condition("Degraded").get("reason") == "CrashLoopBackOff")
    assert cluster.condition("Degraded")["status"] == "True" and cluster.condition("Degraded")["message"].startswith("canary: ")
    cluster.until("Failed")
    assert (
        "not ready within 120 s" in cluster.condition("Progressing")["message"]
        and "no such model" in cluster.condition("Progressing")["message"]
    )
    assert cluster.stable() == before


def test_manual_promotion_waits_for_the_name_of_the_revision() -> None:
    cluster = begun(asked=ASKED | {"promotion": "Manual"})
    old = cluster.running()
    cluster.edit(engine={"maxNumSeqs": 2})
    cluster.until("Paused")
    cluster.run(150.0)
    assert cluster.phase == "Paused" and cluster.running() == old
    named = cluster.api.objects[SERVICE]["status"]["canary"]["revision"]
    assert named in cluster.condition("Progressing")["message"]
    cluster.edit(rollout={"canary": ASKED | {"promotion": "Manual", "promotedRevision": named}})
    cluster.settle()
    assert cluster.running() == named
    cluster.edit(engine={"maxNumSeqs": 3})
    cluster.until("Paused")


def test_without_requests_nothing_is_concluded_and_without_a_canary_in_the_spec_it_rolls_out() -> None:
    cluster = begun()
    old = cluster.running()
    cluster.traffic = False
    cluster.edit(engine={"maxNumSeqs": 2})
    cluster.until("Analyzing")
    cluster.run(120.0)
    assert cluster.phase == "Analyzing" and cluster.running() == old and "minRequests" in cluster.condition("Progressing")["message"]
    cluster.edit(rollout={"canary": None})
    cluster.run(1500.0, until=lambda: cluster.complete)
    assert cluster.running() != old and CANARY not in cluster.api.objects and CONFIG not in cluster.api.objects


def test_another_weight_reaches_the_routers_and_restarts_no_pod() -> None:
    cluster = begun(asked=ASKED | {"analysisSeconds": 3600})
    cluster.edit(engine={"maxNumSeqs": 2})
    cluster.until("Analyzing")
    cluster.run(30.0)
    written, pods = len(cluster.api.writes), {body["metadata"]["name"] for body in cluster.api.of("Pod")}
    cluster.edit(rollout={"canary": ASKED | {"analysisSeconds": 3600, "trafficPercent": 50}})
    cluster.run(60.0)
    assert cluster.split["weight"] == 50 and {body["metadata"]["name"] for body in cluster.api.of("Pod")} == pods
    assert {key for _, what, key in cluster.api.writes[written:] if what == "apply"} == {CONFIG}


def test_paused_begins_no_canary_and_promotes_none() -> None:
    cluster = begun()
    old = cluster.running()
    cluster.edit(engine={"maxNumSeqs": 2}, rollout={"paused": True})
    cluster.run(90.0)
    assert cluster.running() == old and CANARY not in cluster.api.objects
    cluster.edit(rollout={"paused": False})
    cluster.until("Analyzing")
    cluster.edit(rollout={"paused": True})
    cluster.run(90.0)
    assert cluster.running() == old and CANARY in cluster.api.objects
    cluster.edit(rollout={"paused": False})
    cluster.settle()


@pytest.mark.parametrize("seed", range(5))
def test_whatever_is_edited_it_converges_and_the_operator_may_end_whenever(seed: int) -> None:
    cluster = begun(seed)
    chance = cluster.chance
    for _ in range(8):
        what = chance.randrange(6)
        if what < 2:
            cluster.edit(engine={"maxNumSeqs": chance.randint(1, 5), "args": ["--broken"] if chance.random() < 0.2 else []})
        elif what == 2:
            cluster.edit(replicas=chance.randint(0, 3))
        elif what == 3:
            cluster.edit(rollout={"canary": chance.choice([None, ASKED, ASKED | {"trafficPercent": 60, "replicas": 2}])})
        elif what == 4:
            cluster.restart_operator(worker_image=chance.choice(["worker:1", "worker:2"]))
        else:
            cluster.error_rate = chance.choice([0.0, 0.0, 0.5])
        cluster.run(chance.choice([0.0, 3.0, 30.0, 120.0]))
    cluster.error_rate = 0.0
    cluster.edit(replicas=2, engine={"maxNumSeqs": 9, "args": []}, rollout={"canary": ASKED})
    cluster.settle()
    cluster.run(60.0)
    written = len(cluster.api.writes)
    cluster.restart_operator()
    cluster.run(100.0)
    assert cluster.api.writes[written:] == []


def test_the_split_is_no_part_of_the_routers_revision() -> None:
    plain = router_revision(service())
    one = router_revision(service(rollout={"canary": {}}))
    assert one != plain and one == router_revision(
        service(rollout={"canary": {"trafficPercent": 50, "promotion": "Manual", "replicas": 3}})
    )
    assert worker_revision(service()) == worker_revision(service(rollout={"canary": {"trafficPercent": 50}}))
    made = {made["kind"]: made for made in router.objects(service(rollout={"canary": {}}), SETTINGS, Observed())}
    container = made["Deployment"]["spec"]["template"]["spec"]["containers"][0]
    assert "--canary-file=/etc/fairlead/split/split.json" in container["args"]
