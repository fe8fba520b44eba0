"""Only the user's spec restarts pods: templates are rendered once for each revision, kept, reused, and forgotten in the end."""

from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.operator.support import apiserver
from tests.operator.support.cluster import Cluster, eventually
from tests.operator.support.manifests import SETTINGS, manifest, service
from tests.operator.support.running_operator import StubRouter, run_operator

from fairlead_operator.api import InferenceService, ServiceSpec
from fairlead_operator.desired import desired
from fairlead_operator.kube.kinds import REVISIONS
from fairlead_operator.observed import Observed
from fairlead_operator.revisions import MAX_REVISIONS, non_default_fields, worker_revision

NOW = datetime(2026, 1, 1, tzinfo=UTC)
SPECS = [{"engine": {"maxNumSeqs": number}} for number in range(1, 9)]
OPERATORS = [
    SETTINGS,
    replace(SETTINGS, worker_image="worker:2", router_image="control:2"),
    replace(SETTINGS, default_gpus=0, redis_url="", image_pull_policy="Always", cluster_domain="other"),
]


class History:
    """The revisions in the cluster, as the applier leaves them."""

    def __init__(self) -> None:
        self.held: tuple[Mapping[str, Any], ...] = ()

    def templates(self, one: InferenceService, operator: int) -> dict[str, Any]:
        observed = Observed(revisions=self.held)
        objects = desired(one, observed, OPERATORS[operator], NOW).objects
        self.held = tuple(made for made in objects if made["kind"] == REVISIONS.kind)
        again = desired(one, Observed(revisions=self.held), OPERATORS[operator], NOW).objects
        assert again == objects, "a second look finds nothing to do"
        return {made["metadata"]["name"]: made["spec"]["template"] for made in objects if made["kind"] == "Deployment"}


@given(st.lists(st.tuples(st.sampled_from(range(len(SPECS))), st.sampled_from(range(len(OPERATORS)))), max_size=30))
@settings(deadline=None)
def test_an_operator_never_changes_the_template_of_a_spec(steps: list[tuple[int, int]]) -> None:
    history = History()
    used: dict[int, Any] = {}  # spec → its template, those used last at the end
    for spec, running in steps:
        made = history.templates(service(**SPECS[spec]), running)
        if spec in list(used)[-MAX_REVISIONS:]:
            assert made["qwen-worker"] == used.pop(spec), "of a spec that is kept, the template stays"
        used.pop(spec, None)
        used[spec] = made["qwen-worker"]
        names = [body["metadata"]["name"] for body in history.held]
        assert sum(name.startswith("qwen-worker-") for name in names) == min(len(used), MAX_REVISIONS)
        assert sum(name.startswith("qwen-router-") for name in names) == 1, "what shapes workers only leaves the routers alone"


def test_a_service_created_again_has_no_old_revisions() -> None:
    history = History()
    history.templates(service(), 0)
    again = replace(service(), uid="uid-2")
    assert history.templates(again, 1)["qwen-worker"]["spec"]["containers"][0]["image"] == "worker:2"


def test_what_is_left_out_and_what_is_written_as_its_default_are_the_same() -> None:
    spelled_out = ServiceSpec.model_validate(manifest()["spec"]).model_dump(mode="json", by_alias=True, exclude_none=True)
    assert non_default_fields(ServiceSpec.model_validate(spelled_out)) == {"model": {"uri": "hf://Qwen/Qwen3-8B"}}


def test_a_revision_that_lost_its_labels_is_found_again(server: apiserver.ApiServer, namespace: str, router: StubRouter) -> None:
    cluster = Cluster(server, namespace)
    with run_operator(server.kubeconfig, namespace, router.url):
        name = f"qwen-worker-{worker_revision(InferenceService.parse(cluster.create()))}"
        eventually(lambda: cluster.get("deployments", "qwen-worker"))
    cluster.patch("controllerrevisions", name, {"metadata": {"labels": None}})
    with run_operator(server.kubeconfig, namespace, router.url, worker_image="worker:2"):
        eventually(lambda: (cluster.get("controllerrevisions", name)["metadata"].get("labels") or {}).get("app.kubernetes.io/instance"))
        cluster.patch("inferenceservices", "qwen", {"spec": {"replicas": 4}})
        eventually(lambda: cluster.get("deployments", "qwen-worker")["spec"]["replicas"] == 4)
        (container,) = cluster.get("deployments", "qwen-worker")["spec"]["template"]["spec"]["containers"]
        assert container["image"] == "worker:1"
    cluster.server.request("DELETE", cluster.path("controllerrevisions", name))
    with run_operator(server.kubeconfig, namespace, router.url):
        eventually(lambda: cluster.get("controllerrevisions", name))
