"""Workers over several nodes: the objects in place of a Deployment, and how its pods are counted. Pure."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.operator.support.manifests import SETTINGS, container, deployment, service

from fairlead.errors import UserError
from fairlead.kube.facts import Facts
from fairlead.kube.sections import describe_component
from fairlead.local.workloads import workloads
from fairlead_operator.api import InferenceService, InvalidManifest
from fairlead_operator.children import groups
from fairlead_operator.desired import Desired, desired
from fairlead_operator.objects import Object
from fairlead_operator.observed import Observed
from fairlead_operator.revisions import worker_revision
from fairlead_operator.rollout.step import DRAIN, SURGE
from fairlead_operator.status import groups as group_view
from fairlead_operator.status.conditions import find
from fairlead_operator.status.unsupported import find_unsupported
from fairlead_worker.config import WorkerConfig

NOW = datetime(2026, 1, 1, 12, 0, 0, tzinfo=UTC)
ENGINE = {"tensorParallel": 16, "nodes": 2}
INSUFFICIENT = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."


def ago(seconds: float) -> str:
    return (NOW - timedelta(seconds=seconds)).isoformat()


def made(one: InferenceService, observed: Observed | None = None) -> dict[tuple[str, str], Object]:
    plan = desired(one, observed or Observed(), SETTINGS, NOW)
    return {(body["kind"], body["metadata"]["name"]): body for body in plan.objects}


def wanted(one: InferenceService, observed: Observed | None = None) -> Object:
    return made(one, observed)["LeaderWorkerSet", "qwen-worker"]


def live(one: InferenceService, *, written: float = 60, **bounds: Any) -> dict[str, Any]:
    """The set as the API server stores it, `written` seconds ago; its controller has not seen it yet."""
    body = wanted(one)
    body["metadata"] |= {"generation": 3, "creationTimestamp": ago(written)}
    body["spec"]["rolloutStrategy"]["rollingUpdateConfiguration"] |= bounds
    return body


def pod(
    name: str, revision: str, *, ready: bool = True, waits: float | None = None, of: str = "worker", made: float = 50
) -> dict[str, Any]:
    labels = {"app.kubernetes.io/component": of, "app.kubernetes.io/instance": "qwen", "fairlead.dev/revision": revision}
    conditions = [{"type": "Ready", "status": "True" if ready else "False", "lastTransitionTime": ago(made - 10)}]
    if waits is not None:
        unscheduled = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": INSUFFICIENT}
        conditions.append(unscheduled | {"lastTransitionTime": ago(waits)})
    metadata = {"name": name, "uid": name, "namespace": "default", "labels": labels, "creationTimestamp": ago(made)}
    return {"kind": "Pod", "metadata": metadata, "status": {"phase": "Running" if ready else "Pending", "conditions": conditions}}


def look(one: InferenceService, *pods: dict[str, Any], body: dict[str, Any] | None = None) -> Desired:
    sets = {"LeaderWorkerSet": body or live(one)}
    observed = Observed({"router": deployment("router", 2)}, pods=pods, optional_objects=sets, served=frozenset(sets))
    return desired(one, group_view.with_group_as_deployment(one, observed, NOW), SETTINGS, NOW)


def bounds(plan: Desired) -> dict[str, Any]:
    (body,) = [each for each in plan.objects if each["kind"] == "LeaderWorkerSet"]
    return dict(body["spec"]["rolloutStrategy"]["rollingUpdateConfiguration"])


def condition(plan: Desired, type_: str) -> tuple[str, str, str]:
    found = find(plan.status.conditions, type_)
    assert found is not None
    return found.status, found.reason, found.message


def test_a_set_of_groups_stands_where_the_deployment_stood() -> None:
    one = service(engine=ENGINE, replicas=3)
    objects = made(one)
    assert ("Deployment", "qwen-worker") not in objects
    body = objects["LeaderWorkerSet", "qwen-worker"]
    assert body["apiVersion"] == "leaderworkerset.x-k8s.io/v1" and body["spec"]["replicas"] == 3
    assert body["metadata"]["ownerReferences"][0]["uid"] == "uid-1"
    template = body["spec"]["leaderWorkerTemplate"]
    assert (template["size"], template["restartPolicy"]) == (2, "RecreateGroupOnPodRestart")
    leader, follower = template["leaderTemplate"], template["workerTemplate"]
    assert leader["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "8"
    labels = [each["metadata"]["labels"]["app.kubernetes.io/component"] for each in (leader, follower)]
    assert labels == ["worker", "follower"]
    serving = {"ports", "startupProbe", "readinessProbe", "livenessProbe"}
    (leading,), (following,) = leader["spec"]["containers"], follower["spec"]["containers"]
    assert serving <= leading.keys() and {key: value for key, value in leading.items() if key not in serving} == following
    (spread,) = follower["spec"]["topologySpreadConstraints"]
    assert spread["labelSelector"]["matchLabels"]["app.kubernetes.io/component"] == "follower"


def test_both_pods_commands_are_the_workers_own(monkeypatch: pytest.MonkeyPatch) -> None:
    adapters = [{"name": "sql", "uri": "hf://lab/sql@v1"}, {"name": "tone", "uri": "pvc://loras/tone"}]
    body = wanted(service(engine=ENGINE, model={"uri": "pvc://models/big", "adapters": adapters}))
    for rank, template in enumerate(("leaderTemplate", "workerTemplate")):
        (one,) = body["spec"]["leaderWorkerTemplate"][template]["spec"]["containers"]
        for variable in one["env"]:
            if variable["name"].startswith("FAIRLEAD_"):
                monkeypatch.setenv(variable["name"], variable.get("value", "qwen-0").replace("$(POD_IP)", "10.0.0.7"))
        for name, value in {"LEADER_ADDRESS": "qwen-worker-0.qwen-worker.default", "GROUP_SIZE": "2", "WORKER_INDEX": str(rank)}.items():
            monkeypatch.setenv(f"LWS_{name}", value)
        config = WorkerConfig.from_command_line(one["args"])
        assert (config.nnodes, config.node_rank, config.local_ranks) == (2, rank, 8)
        assert config.leader_address == ("qwen-worker-0.qwen-worker.default", 8001)
        # Each node fetches adapters by itself, from its own cache and its own mount.
        assert config.loras == {"sql": "hf://lab/sql@v1", "tone": "file:///mnt/adapters/1/tone"} and config.model_cache
        assert "/mnt/adapters/1" in {mount["mountPath"] for mount in one["volumeMounts"]}


def test_the_secret_is_of_the_service_and_of_the_revision() -> None:
    def secret(one: InferenceService) -> tuple[str, str]:
        (first,) = wanted(one)["spec"]["leaderWorkerTemplate"]["leaderTemplate"]["spec"]["containers"]
        env = {each["name"]: each for each in first["env"]}
        return env["NODES_SECRET"]["valueFrom"]["secretKeyRef"]["name"], env["FAIRLEAD_NODES_SECRET"]["value"]

    one = service(engine=ENGINE)
    others = [replace(one, uid="uid-2"), service(engine={**ENGINE, "maxNumSeqs": 8})]
    assert len({secret(each) for each in (one, *others)}) == 3
    assert secret(one) == secret(service(engine=ENGINE, replicas=5))


def test_network_policies_and_disruption_budget_of_groups() -> None:
    objects = made(service(engine=ENGINE))
    labels = [objects["NetworkPolicy", f"qwen-{name}"]["spec"]["podSelector"]["matchLabels"] for name in ("worker", "follower")]
    group = [{"podSelector": {"matchLabels": each}} for each in labels]
    follower, leader = (objects["NetworkPolicy", f"qwen-{name}"]["spec"]["ingress"] for name in ("follower", "worker"))
    assert follower == [{"from": group}], "only the group, on any port"
    assert leader[2] == {"from": group} and [rule["ports"][0]["port"] for rule in leader[:2]] == [8000, 8002]
    selector = objects["PodDisruptionBudget", "qwen-worker"]["spec"]["selector"]
    assert selector["matchExpressions"] == [{"key": "app.kubernetes.io/component", "operator": "In", "values": ["worker", "follower"]}]
    assert "app.kubernetes.io/component" not in selector["matchLabels"]
    alone = made(service())
    assert ("NetworkPolicy", "qwen-follower") not in alone
    assert alone["PodDisruptionBudget", "qwen-worker"]["spec"]["selector"].keys() == {"matchLabels"}


def test_annotations_for_the_set_reach_it() -> None:
    chosen = {"leaderworkerset.sigs.k8s.io/exclusive-topology": "rack", "other": "x"}
    body = wanted(service(engine=ENGINE, podTemplate={"metadata": {"annotations": chosen}}))
    assert body["metadata"]["annotations"] == {"leaderworkerset.sigs.k8s.io/exclusive-topology": "rack"}


def test_only_leaders_are_counted() -> None:
    one = service(engine=ENGINE, replicas=2)
    revision = worker_revision(one)
    leaders = [pod(f"qwen-worker-{group}", revision) for group in range(2)]
    followers = [pod(f"qwen-worker-{group}-1", revision, of="follower") for group in range(2)]
    plan = look(one, *leaders, *followers)
    assert plan.servable and plan.status.desired_replicas == 2
    assert (plan.status.replicas, plan.status.ready_replicas, plan.status.updated_replicas) == (2, 2, 2)
    assert plan.status.selector is not None and "component=worker" in plan.status.selector
    half = look(one, leaders[0], pod("qwen-worker-1", revision, ready=False), *followers)
    assert (
        half.servable
        and condition(half, "Progressing")[0] == "True"
        and (half.status.ready_replicas, half.status.desired_replicas) == (1, 2)
        and condition(half, "Available")[0] == "True"
    )


def test_a_follower_that_cannot_run_is_the_reported_cause() -> None:
    one = service(engine=ENGINE)
    revision = worker_revision(one)
    leader = pod("qwen-worker-0", revision, ready=False)
    leader["status"]["containerStatuses"] = [container({"running": {}})]
    plan = look(one, leader, pod("qwen-worker-0-1", revision, ready=False, waits=20, of="follower"))
    status, reason, message = condition(plan, "Ready")
    assert (status, reason) == ("False", "FailedScheduling") and "pod qwen-worker-0-1" in message


def test_a_rollout_has_the_bounds_of_any_other_and_auto_drains_where_no_follower_has_room() -> None:
    one = service(engine=ENGINE, replicas=2)
    revision = worker_revision(one)
    old = [pod(f"qwen-worker-{group}", "old") for group in range(2)]

    assert bounds(look(one, *old)) == {**SURGE, "partition": 0}
    surge = pod("qwen-worker-2", revision, ready=False, made=20)
    waiting = look(one, *old, surge, pod("qwen-worker-2-1", revision, ready=False, waits=10, of="follower"))
    assert bounds(waiting) == {**SURGE, "partition": 0} and waiting.wake_at == NOW.timestamp() + 20
    drained = look(one, *old, surge, pod("qwen-worker-2-1", revision, ready=False, waits=31, of="follower"))
    assert bounds(drained) == {**DRAIN, "partition": 0}
    assert "draining one first" in condition(drained, "Progressing")[2]
    first = service(engine=ENGINE, replicas=2, rollout={"strategy": "DrainFirst"})
    assert bounds(look(first, *old)) == {**DRAIN, "partition": 0}


def test_a_pause_holds_every_group_and_its_end_begins_with_a_surge() -> None:
    one, goes_on = service(engine=ENGINE, replicas=2, rollout={"paused": True}), service(engine=ENGINE, replicas=2)
    old = [pod(f"qwen-worker-{group}", "old") for group in range(2)]
    plan = look(one, *old)
    assert bounds(plan) == {"maxSurge": 0, "maxUnavailable": 1, "partition": groups.PAUSED_PARTITION}
    assert condition(plan, "Progressing")[1] == "Paused"
    held = live(goes_on, partition=groups.PAUSED_PARTITION, maxSurge=0)
    assert bounds(look(goes_on, *old, body=held)) == {**SURGE, "partition": 0}


def test_a_group_without_progress_is_reported_at_the_deadline() -> None:
    one = service(engine=ENGINE, rollout={"progressDeadlineSeconds": 600})
    starting = pod("qwen-worker-0", worker_revision(one), ready=False, made=500)
    plan = look(one, starting, body=live(one, written=550))
    assert condition(plan, "Progressing")[1] == "RollingOut" and plan.wake_at == NOW.timestamp() + 100
    late = look(one, pod("qwen-worker-0", worker_revision(one), ready=False, made=700), body=live(one, written=750))
    status, reason, message = condition(late, "Progressing")
    assert (status, reason) == ("False", "ProgressDeadlineExceeded")
    assert "LeaderWorkerSet qwen-worker has made no progress for 600 s" in message


def test_an_unresponsive_lws_controller_is_reported() -> None:
    one = service(engine=ENGINE)
    status, reason, message = condition(look(one, body=live(one, written=90)), "Ready")
    assert (status, reason) == (
        "False",
        "ControllerNotResponding",
    ) and "LeaderWorkerSet qwen-worker: no pod was created for 60 s" in message
    assert "LeaderWorkerSet's own controller" in message


@pytest.mark.parametrize(
    ("engine", "served", "reason", "words"),
    [
        (ENGINE, (), "LeaderWorkerSetMissing", "needs LeaderWorkerSet (leaderworkerset.x-k8s.io/v1, release 0.9 or newer)"),
        ({"tensorParallel": 32, "nodes": 2}, ("LeaderWorkerSet",), "TensorParallelUnsupported", "tensorParallel is 32 over 2 nodes"),
        ({"runtime": "VLLM", "tensorParallel": 4, "args": ["-pp=4"]}, (), "TensorParallelUnsupported", "times the pipeline stages"),
    ],
)
def test_unsupported_specs_are_reported(engine: Any, served: tuple[str, ...], reason: str, words: str) -> None:
    problem = find_unsupported(service(engine=engine), served)
    assert problem is not None and problem[0] == reason and words in problem[1]


def test_supported_specs_are_accepted() -> None:
    assert find_unsupported(service(engine=ENGINE), ("LeaderWorkerSet",)) is None
    adapted = service(engine={"tensorParallel": 2}, model={"uri": "hf://a/b", "adapters": [{"name": "sql", "uri": "hf://a/sql"}]})
    assert find_unsupported(adapted, ()) is None
    with pytest.raises(InvalidManifest, match=r"must be a multiple of spec\.engine\.nodes"):
        service(engine={"tensorParallel": 9, "nodes": 2})


def test_the_example_is_accepted_and_makes_what_it_says() -> None:
    one = InferenceService.parse(yaml.safe_load((Path(__file__).parents[3] / "examples" / "multi-node.yaml").read_text()))
    template = made(one)["LeaderWorkerSet", f"{one.name}-worker"]["spec"]["leaderWorkerTemplate"]["workerTemplate"]["spec"]
    (container,) = template["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "8"
    assert {"name": "NCCL_SOCKET_IFNAME", "value": "eth0"} in container["env"]


def test_kubectl_fairlead_shows_the_set_and_its_followers() -> None:
    one = service(engine=ENGINE)
    revision = worker_revision(one)
    pods = [pod("qwen-worker-0", revision, ready=False), pod("qwen-worker-0-1", revision, ready=False, waits=20, of="follower")]
    facts = Facts({}, deployments={"worker": group_view.as_deployment(live(one), pods)}, pods=pods)
    told = [line.text for line in describe_component(facts, "worker", {})]
    assert told[0] == "LeaderWorkerSet qwen-worker wants 1: 0 ready, 1 of the desired revision"
    assert any("qwen-worker-0-1" in text and "Insufficient" in text for text in told)


def test_local_mode_has_one_machine() -> None:
    with pytest.raises(UserError, match=r"spec\.engine\.nodes is above 1, but local mode has one machine"):
        workloads([wanted(service(engine=ENGINE))], service="qwen", router_port=0)
