"""The output of `kubectl fairlead`, without a cluster: statuses, free GPUs of nodes, and a cluster that becomes unreachable."""

from datetime import UTC, datetime
from io import StringIO
from pathlib import Path
from typing import Any, cast

import pytest
from rich.console import Console
from tests.operator.support.manifests import container, deployment, pod

from fairlead.errors import UserError
from fairlead.kube import sections, table, top
from fairlead.kube.api import Kube, UnexpectedStatus
from fairlead.kube.explain import explain
from fairlead.kube.facts import Facts, find_gpu_resource, gpus_in_use, list_references
from fairlead.kube.live import Live, ignored_lines
from fairlead.kube.snapshot import row, through_proxy

NOW = datetime(2026, 1, 1, 12, 0, 0, tzinfo=UTC)
READY = {"type": "Ready", "status": "True", "reason": "Serving", "message": "x", "lastTransitionTime": "2026-01-01T11:00:00Z"}


def service(**status: Any) -> dict[str, Any]:
    made = {"readyReplicas": 1, "desiredReplicas": 1, "observedGeneration": 1, "conditions": [READY], **status}
    return {"metadata": {"namespace": "team", "name": "qwen", "generation": 1}, "spec": {"model": {"uri": "hf://org/m"}}, "status": made}


def shown(*rows: Any) -> str:
    console = Console(file=StringIO(), width=160, highlight=False)
    console.print(table.build_table(rows, namespaces=True))
    table.print_messages(console, rows)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def test_loading_scaling_and_traffic_of_the_status_are_shown() -> None:
    status: dict[str, Any] = {
        "loading": {"phase": "Downloading", "percent": 35, "podName": "w"},
        "scaling": {"desiredReplicas": 4, "message": "TTFT"},
    }
    status |= {"traffic": {"tokensPerSecond": 12000, "cacheHitPercent": 81}}
    made = row(service(**status), [pod("v"), pod("w")], Live())
    assert [one.loading for one in made.pods] == ["", "Downloading 35 %"], "of the pod that the status names"
    text = shown(made)
    assert "Downloading 35 %" in text and "12,000" in text and "81%" in text and "scaling: desiredReplicas: 4, message: TTFT" in text


def test_a_ready_pod_shows_the_state_that_the_router_reports() -> None:
    ready = pod("w", conditions=[{"type": "Ready", "status": "True"}])
    looks = [{"draining": True}, {"usable": False}, {"usable": True}]
    states = [row(service(), [ready], Live(workers={"w": {"load": {}, **look}})).pods[0].state for look in looks]
    assert states == ["Draining", "Avoided", "Ready"]
    crashed = pod("w", containerStatuses=[container({"terminated": {"exitCode": 1, "message": "x"}}, restartCount=4)])
    found = row(service(), [crashed], Live()).pods[0]
    assert (found.state, found.restarts) == ("CrashLoopBackOff", 4) and "--previous" in found.message


def test_an_unreachable_cluster_leaves_the_last_output() -> None:
    first = row(service(), [], Live())
    answers: list[Any] = [[first], UserError("cannot be reached"), [first]]

    def look() -> Any:
        answer = answers.pop(0)
        if isinstance(answer, UserError):
            raise answer
        return answer

    seen = top.frames(look, 0.0, sleep=lambda _: None)
    assert next(seen) == ([first], "cannot be reached") and next(seen) == ([first], "")


def node(name: str, gpus: int, **spec: Any) -> dict[str, Any]:
    return {"metadata": {"name": name}, "spec": spec, "status": {"allocatable": {"nvidia.com/gpu": str(gpus)}}}


def test_nodes_show_free_gpus_and_what_keeps_pods_away() -> None:
    asks = {"nodeName": "a", "containers": [{"resources": {"limits": {"nvidia.com/gpu": "3"}}}]}
    used = gpus_in_use([{"spec": asks, "status": {"phase": "Running"}}, {"spec": asks, "status": {"phase": "Failed"}}])
    assert used == {"a": 3}
    nodes = [node("a", 8), node("b", 4, unschedulable=True, taints=[{"key": "gpu", "effect": "NoSchedule"}]), node("c", 0)]
    lines = [(line.text, line.ok) for line in sections.describe_nodes(Facts(service(), nodes=nodes, gpus_in_use=used))]
    assert lines == [("a: 8 GPUs, 5 free", True), ("b: 4 GPUs, 4 free, cordoned, taints gpu:NoSchedule", False)]
    assert [line.ok for line in sections.describe_nodes(Facts(service(), nodes=[node("c", 0)]))] == [False]
    assert list(sections.describe_nodes(Facts(service()))) == [], "unknown values are reported elsewhere"


def test_gpus_of_another_vendor_are_counted_by_their_resource_name() -> None:
    worker = {"name": "worker", "resources": {"limits": {"memory": "8Gi", "amd.com/gpu": "2"}}}
    pod = {"spec": {"nodeName": "m", "containers": [{"name": "side"}, worker]}, "status": {"phase": "Running"}}
    assert find_gpu_resource([pod]) == "amd.com/gpu" and find_gpu_resource([{"spec": {"containers": [{"name": "worker"}]}}]) is None
    node = {"metadata": {"name": "m"}, "status": {"allocatable": {"amd.com/gpu": "8"}}}
    facts = Facts(service(), nodes=[node], gpu_resource="amd.com/gpu", gpus_in_use=gpus_in_use([pod], "amd.com/gpu"))
    assert [line.text for line in sections.describe_nodes(facts)] == ["m: 8 GPUs, 6 free"]


def test_a_service_is_explained_with_the_fields_of_its_profile() -> None:
    body = service()
    body["spec"]["profileRef"] = {"name": "h100"}
    facts = Facts(body, references={("InferenceProfile", "h100"): {"spec": {"access": {"keysSecretRef": {"name": "keys"}}}}})
    assert ("Secret", "secrets", "keys", "spec.access.keysSecretRef") in list(list_references({"spec": facts.spec()}))
    facts = Facts(body, references={("InferenceProfile", "h100"): None}, why={("InferenceProfile", "h100"): "spec.profileRef"})
    assert facts.spec() == body["spec"]
    assert [line.text for line in sections.describe_references(facts)] == ["InferenceProfile h100 (spec.profileRef): does not exist"]


def test_claims_and_secrets_of_a_manifest_are_found_in_all_places() -> None:
    made = service()
    volumes = [{"name": "x", "persistentVolumeClaim": {"claimName": "c"}}, {"name": "y", "secret": {"secretName": "d"}}]
    made["spec"] = {
        "model": {
            "uri": "pvc://a/path",
            "cache": {"persistentVolumeClaim": {"claimName": "b"}},
            "secretRef": {"name": "e"},
            "adapters": [{"name": "sql", "uri": "pvc://h/sql"}, {"name": "tone", "uri": "hf://lab/tone"}],
        },
        "access": {"keysSecretRef": {"name": "f"}},
        "podTemplate": {"spec": {"volumes": volumes, "imagePullSecrets": [{"name": "g"}]}},
    }
    assert sorted(name for _, _, name, _ in list_references(made)) == list("abcdefgh")


def test_a_service_with_an_unprocessed_edit_is_not_ready() -> None:
    made = service()
    made["metadata"]["generation"] = 2
    story = explain(Facts(made), NOW)
    assert not story.ready and "has not processed the last edit" in story.headline and "fairlead-operator runs" in story.next[0]


def test_wake_up_by_request_or_by_hand_is_suggested_only_where_it_is_allowed() -> None:
    made = service(conditions=[{**READY, "status": "False", "reason": "ScaledToZero"}])
    assert explain(Facts(made), NOW).next == ["Scale it up: kubectl scale inferenceservices.fairlead.dev qwen -n team --replicas=1"]
    story = explain(Facts(service(conditions=[{**READY, "reason": "Asleep"}])), NOW)
    (only,) = story.next
    assert story.ready and "kubectl scale" not in only and "next request" in only, "the API server refuses to scale it"


def test_a_service_that_serves_during_a_rollout_or_with_a_fault_says_so() -> None:
    step = {**READY, "type": "Progressing", "reason": "RollingOut", "message": "1 of 3 workers"}
    story = explain(Facts(service(conditions=[READY, step, {**step, "type": "Reconciling"}])), NOW)
    assert story.ready and story.next == ["Nothing: it serves while pods are replaced. 1 of 3 workers"]
    assert [line.ok for line in story.sections["conditions"]] == [True, None, None]
    fault = {**READY, "reason": "InvalidSpec", "message": "spec.engine.dtype: must be"}
    kinds = [READY, {**fault, "type": "Degraded"}, {**fault, "type": "Stalled"}]
    story = explain(Facts(service(conditions=kinds)), NOW)
    assert story.ready and "but has a problem: InvalidSpec" in story.headline and "spec.engine.dtype" in story.next[0]
    assert [line.ok for line in story.sections["conditions"]] == [True, False, False]
    rolling = row(service(conditions=[READY, step]), [], Live())
    assert rolling.reason == "Serving" and "RollingOut: 1 of 3 workers" in rolling.notes


def test_a_paused_deployment_and_a_missing_claim_are_next_steps() -> None:
    paused = deployment("worker", 1, updated=0)
    paused["metadata"]["name"], paused["spec"]["paused"] = "qwen-worker", True
    unready = [{**READY, "status": "False", "reason": "RolloutPaused"}]
    facts = Facts(service(conditions=unready), deployments={"worker": paused}, references={("PersistentVolumeClaim", "w"): None})
    facts.why = {("PersistentVolumeClaim", "w"): "spec.model.cache.persistentVolumeClaim"}
    story = explain(facts, NOW)
    assert story.headline.endswith("PersistentVolumeClaimMissing") and "rollout resume deployment/qwen-worker" in story.next[1]
    assert "Ready False for 60 min" in story.sections["conditions"][0].text


def test_without_a_kubeconfig_the_error_asks_for_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The message does not mention the variables that exist only in pods."""
    for name in ("KUBECONFIG", "KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "config"))
    with pytest.raises(UserError, match=r"there is no ~/\.kube/config with a context, and this is not a pod\. Give --kubeconfig"):
        Kube.connect()
    with pytest.raises(UserError, match=f"{tmp_path}/other"):
        Kube.connect(kubeconfig=str(tmp_path / "other"))


def test_records_that_the_router_ignores_are_explained() -> None:
    forged = {"address": "10.9.9.9:8000", "reason": "unknown_address", "incarnation": "00", "count": 3, "seconds": 42.0}
    live = Live(ignored=[forged | {"address": f"10.9.9.{number}:8000"} for number in range(7)])
    made = service()
    lines = [line.text for line in explain(Facts(made, live=live), NOW).sections["service"]]
    told = [line for line in lines if "index record" in line]
    assert "10.9.9.0:8000 ignored for 42 s" in told[0] and "rotate the service's Redis credentials" in told[0]
    assert "rotate" not in ignored_lines([forged | {"seconds": 12.0}])[0], "a worker that starts"
    assert len(told) == 6 and told[-1].startswith("2 more")
    assert "10.9.9.0:8000" in shown(row(made, [], live))


def test_routers_are_read_at_their_admin_port_and_a_failure_suggests_port_forward() -> None:
    class Api:
        def __init__(self, error: UserError | None = None) -> None:
            self.asked, self.error = "", error

        def text(self, path: str, **_: str) -> str:
            self.asked = path
            if self.error is not None:
                raise self.error
            return "page"

    api = Api()
    assert through_proxy(cast(Kube, api), "ml", "qwen-router-x", "metrics") == "page"
    assert api.asked == "/api/v1/namespaces/ml/pods/qwen-router-x:8082/proxy/metrics"
    with pytest.raises(
        UserError, match=r"kubectl port-forward -n ml qwen-router-x 8082, and fairlead status --url http://127\.0\.0\.1:8082"
    ):
        through_proxy(cast(Kube, Api(UnexpectedStatus(503, "i/o timeout"))), "ml", "qwen-router-x", "metrics")
