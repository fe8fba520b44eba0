"""The chart: each value is described, a real API server accepts what it renders, and its RBAC rules are all that the operator needs."""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.operator.support import apiserver
from tests.operator.support.chart import CHART, everything, helm, rendered, template
from tests.operator.support.cluster import CHILDREN, Cluster, eventually
from tests.operator.support.manifests import SETTINGS
from tests.operator.support.running_operator import StubRouter, run_operator
from tests.servers.redis_server import free_port

from fairlead_operator.api import InferenceService
from fairlead_operator.desired import desired
from fairlead_operator.observed import Observed


def test_every_value_is_described_and_others_are_refused() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    compare(yaml.safe_load((CHART / "values.yaml").read_text()), schema, schema["$defs"], "")


def compare(values: dict[str, Any], schema: dict[str, Any], definitions: dict[str, Any], path: str) -> None:
    if "$ref" in schema:
        schema = {**definitions[schema["$ref"].rsplit("/", 1)[1]], **schema}
    assert path == "" or schema.get("description"), f"{path} is not described"
    if not isinstance(values, dict) or "properties" not in schema:
        return
    assert schema.get("additionalProperties", True) is (path == ".global"), f"{path}: only global is shared with other charts"
    assert set(values) == set(schema["properties"]), f"{path}: values.yaml and values.schema.json differ"
    for key, value in values.items():
        compare(value, schema["properties"][key], definitions, f"{path}.{key}")


@pytest.mark.parametrize(
    "wrong",
    [
        "nonsense=1",
        "operator.nonsense=1",
        "defaults.gpus=-1",
        "clusterDomain=x y",
        "redis.externalUrl=http://x",
        "redis.maxMemory=lots",
        "redis.externalUrl=redis://:p@x",
        "monitoring.namespaces={UPPER}",
        "admissionPolicy.action=Maybe",
        "admissionPolicy.hostPaths={relative}",
        "test.timeoutSeconds=soon",
        "watch.namespaces[0]=Prod",
        "monitoring.interval=0s",
        "networkPolicy.mesh=istio",
    ],
)
def test_invalid_values_are_refused(wrong: str) -> None:
    assert helm("template", "fl", str(CHART), "--set", wrong).returncode != 0


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("redis=null", "missing property 'redis'"),  # what a values file says with a section whose keys are all commented out
        ("images.worker=null", "missing property 'worker'"),
        ("redis.tls=null", "missing property 'tls'"),
    ],
)
def test_missing_values_are_named(given: str, words: str) -> None:
    refused = helm("template", "fl", str(CHART), "--set", given)
    assert refused.returncode != 0 and words in refused.stderr


def test_values_reach_the_operator() -> None:
    made = template(
        *("--set", "images.worker.repository=w", "--set", "images.worker.tag=1", "--set", f"images.control.digest=sha256:{'a' * 64}"),
        *("--set", "defaults.gpus=0", "--set", "redis.externalUrl=redis://r:6379", "--set", "images.pullPolicy=Never"),
        *("--set", "tracing.endpoint=http://collector:4318"),
    )
    (deployment,) = [one for one in made if one["kind"] == "Deployment"]
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert "--worker-image=w:1" in container["args"] and "--default-gpus=0" in container["args"]
    assert "--redis-url=redis://r:6379" in container["args"] and "--image-pull-policy=Never" in container["args"]
    assert "--otlp-endpoint=http://collector:4318" in container["args"]
    assert container["image"].endswith(f"@sha256:{'a' * 64}")


def test_a_tag_that_is_a_number_stays_what_it_is(tmp_path: Path) -> None:
    values = tmp_path / "values.yaml"
    values.write_text("images: {worker: {repository: w, tag: 20260101}, control: {repository: c, tag: 20260102}}")
    made = {one["metadata"]["name"]: one for one in template("-f", str(values)) if one["kind"] == "Deployment"}
    (container,) = made["fl-fairlead-operator"]["spec"]["template"]["spec"]["containers"]
    assert container["image"] == "c:20260102" and "--worker-image=w:20260101" in container["args"]


def test_the_operator_reads_one_secret_its_own() -> None:
    for arguments in ((), ("--set=watch.namespaces[0]=ml",)):
        roles = {one["metadata"]["name"]: one for one in template(*arguments) if one["kind"] in ("Role", "ClusterRole")}
        role = roles["fl-fairlead-operator-credentials"]
        assert (role["kind"], role["metadata"]["namespace"]) == ("Role", "fairlead-system")
        assert [(rule["verbs"], rule.get("resourceNames")) for rule in role["rules"]] == [
            (["create"], None),
            (["get", "update"], ["fl-fairlead-redis-credentials"]),
            (["get"], ["fl-fairlead-operator"]),
        ]
    assert "fl-fairlead-operator-credentials" not in rendered("--set=redis.externalUrl=redis://r:6379"), "there is nothing to keep"


def test_watched_namespaces_need_nothing_cluster_wide() -> None:
    made = template("--set=watch.namespaces={ml,web}", "--set=monitoring.podMonitors=true", "--set=admissionPolicy.enabled=true")
    assert not {"ClusterRole", "ClusterRoleBinding"} & {one["kind"] for one in made}
    for kind in ("Role", "RoleBinding"):
        assert [
            one["metadata"]["namespace"] for one in made if (one["kind"], one["metadata"]["name"]) == (kind, "fl-fairlead-operator")
        ] == [
            "ml",
            "web",
        ]
    (binding,) = [one for one in made if one["kind"] == "ValidatingAdmissionPolicyBinding"]
    assert binding["spec"]["matchResources"]["namespaceSelector"]["matchExpressions"][0]["values"] == ["ml", "web"]
    (operator,) = [one for one in made if one["kind"] == "Deployment" and one["metadata"]["name"].endswith("-operator")]
    assert "--namespaces=ml,web" in operator["spec"]["template"]["spec"]["containers"][0]["args"]


def test_two_operators_may_run_and_leases_are_theirs_at_home_only() -> None:
    made = template("--set", "operator.replicas=2")
    (deployment,) = [one for one in made if one["metadata"]["name"] == "fl-fairlead-operator" and one["kind"] == "Deployment"]
    assert deployment["spec"]["replicas"] == 2 and deployment["spec"]["strategy"]["type"] == "RollingUpdate"
    allowed = [(one["kind"], one["metadata"].get("namespace"), rule) for one in made for rule in one.get("rules") or []]
    leases = [(kind, namespace, rule) for kind, namespace, rule in allowed if "leases" in rule["resources"]]
    assert {(kind, namespace) for kind, namespace, _ in leases} == {("Role", "fairlead-system")}
    assert all(rule["verbs"] == ["create"] or rule["resourceNames"] == ["fl-fairlead-operator"] for _, _, rule in leases)


def test_the_crd_can_be_kept_or_left_out() -> None:
    crds = {one["metadata"]["name"]: one for one in template() if one["kind"] == "CustomResourceDefinition"}
    assert crds.keys() == {"inferenceservices.fairlead.dev", "inferenceprofiles.fairlead.dev"}
    assert all(crd["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"} for crd in crds.values())
    assert not [one for one in template("--set", "crds.install=false") if one["kind"] == "CustomResourceDefinition"]


def test_with_everything_on_it_stays_far_below_what_a_release_may_hold() -> None:
    """Helm keeps a release in one Secret of at most 1 MiB, charts' files and manifests together."""
    assert len(rendered(*everything()).encode()) < 300_000


@pytest.mark.parametrize(("mesh", "tunnel", "probed"), [("istio-ambient", 15008, True), ("linkerd", 4143, False)])
def test_a_mesh_gets_its_tunnel_into_the_policies(mesh: str, tunnel: int, probed: bool) -> None:
    made = template(f"--set=networkPolicy.mesh={mesh}")
    policies = {one["metadata"]["name"]: one["spec"]["ingress"] for one in made if one["kind"] == "NetworkPolicy"}
    (redis_rule,), (metrics, *probes) = policies["fl-fairlead-redis"], policies["fl-fairlead-operator"]
    assert redis_rule["ports"] == [{"protocol": "TCP", "port": 6379}, {"protocol": "TCP", "port": tunnel}]
    assert metrics["ports"] == [{"protocol": "TCP", "port": 8081}, {"protocol": "TCP", "port": tunnel}]
    assert [rule["ports"] for rule in probes] == ([[{"protocol": "TCP", "port": 8081}]] if probed else [])
    (operator_pod,) = [one for one in made if one["kind"] == "Deployment" and one["metadata"]["name"].endswith("-operator")]
    assert f"--mesh={mesh}" in operator_pod["spec"]["template"]["spec"]["containers"][0]["args"]
    (port,) = next(one for one in made if one["kind"] == "Service" and one["metadata"]["name"].endswith("-redis"))["spec"]["ports"]
    assert port["appProtocol"] == "tcp", "its TLS is Redis' own"


def test_redis_is_reached_by_workers_routers_and_the_operator_only() -> None:
    policies = {one["metadata"]["name"]: one["spec"] for one in template("--set=watch.namespaces[0]=ml") if one["kind"] == "NetworkPolicy"}
    (rule,) = policies["fl-fairlead-redis"]["ingress"]
    assert rule["ports"] == [{"protocol": "TCP", "port": 6379}]
    services, operator_pods = rule["from"]
    assert services["namespaceSelector"]["matchExpressions"] == [{"key": "kubernetes.io/metadata.name", "operator": "In", "values": ["ml"]}]
    assert services["podSelector"]["matchExpressions"][0]["values"] == ["worker", "router"]
    assert operator_pods["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "operator"
    (rule,) = policies["fl-fairlead-operator"]["ingress"]
    assert rule["from"] == [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]
    closed = {
        one["metadata"]["name"]: one["spec"] for one in template("--set=monitoring.namespaces=null") if one["kind"] == "NetworkPolicy"
    }
    assert closed["fl-fairlead-operator"]["ingress"] == []
    assert not [one for one in template("--set=networkPolicy.enabled=false") if one["kind"] == "NetworkPolicy"]
    outside = template("--set=redis.externalUrl=redis://r:6379")
    assert [one["metadata"]["name"] for one in outside if one["kind"] == "NetworkPolicy"] == ["fl-fairlead-operator"]


def test_extra_objects_and_pull_secrets(tmp_path: Path) -> None:
    values = tmp_path / "values.yaml"
    text = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: '{{ .Release.Name }}-b'}"
    extra = [{"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a"}}, text]
    values.write_text(json.dumps({"extraObjects": extra, "images": {"pullSecrets": [{"name": "registry"}]}}))
    made = template("-f", str(values))
    assert {"a", "fl-b"} <= {one["metadata"]["name"] for one in made if one["kind"] == "ConfigMap"}
    pods = [one["spec"]["template"]["spec"] for one in made if one["kind"] == "Deployment"]
    assert all(pod["imagePullSecrets"] == [{"name": "registry"}] for pod in pods)


def test_pull_secrets_of_a_parent_chart_are_names_or_objects(tmp_path: Path) -> None:
    values = tmp_path / "values.yaml"
    given = ["registry", {"name": "mirror"}, {"name": "registry"}]
    values.write_text(json.dumps({"global": {"imagePullSecrets": given}, "images": {"pullSecrets": [{"name": "own"}]}}))
    pods = [one["spec"]["template"]["spec"] for one in template("-f", str(values)) if one["kind"] == "Deployment"]
    assert all(pod["imagePullSecrets"] == [{"name": "own"}, {"name": "registry"}, {"name": "mirror"}] for pod in pods) and pods


class StrictLoader(yaml.SafeLoader):
    """Refuses a key that is there twice, as kubeconform and kustomize do."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        assert len(keys) == len(set(keys)), keys
        return super().construct_mapping(node, deep)


def test_a_pods_label_is_written_once_and_its_selector_stays(tmp_path: Path) -> None:
    values = tmp_path / "values.yaml"
    given = {"app.kubernetes.io/version": "mine", "app.kubernetes.io/name": "other", "team": "a"}
    values.write_text(json.dumps({"operator": {"podLabels": given}}))
    made = yaml.load_all(rendered("-f", str(values), "-s", "templates/operator.yaml"), StrictLoader)
    [pod] = [one["spec"]["template"]["metadata"] for one in made if one["kind"] == "Deployment"]
    assert {name: pod["labels"][name] for name in given} == given | {"app.kubernetes.io/name": "fairlead"}


def test_operator_and_redis_are_placed_as_asked() -> None:
    asked = [
        f"--set={one}.nodeSelector.pool=system,{one}.priorityClassName=high,{one}.tolerations[0].key=gpu" for one in ("operator", "redis")
    ]
    for pod in (one["spec"]["template"]["spec"] for one in template(*asked) if one["kind"] == "Deployment"):
        assert pod["nodeSelector"] == {"pool": "system"} and pod["priorityClassName"] == "high" and pod["tolerations"] == [{"key": "gpu"}]


def test_editors_and_viewers_of_a_namespace_may_edit_and_view_its_services() -> None:
    roles = {one["metadata"]["name"]: one for one in template() if one["kind"] == "ClusterRole"}
    prefix = "rbac.authorization.k8s.io/aggregate-to-"
    for name, into, verbs in (("edit", {"admin", "edit"}, {"create", "patch", "delete"}), ("view", {"view"}, {"get", "list", "watch"})):
        role = roles[f"fl-fairlead-{name}"]
        assert {key.removeprefix(prefix) for key in role["metadata"]["labels"] if key.startswith(prefix)} == into
        assert verbs <= set(role["rules"][0]["verbs"]) and role["rules"][0]["apiGroups"] == ["fairlead.dev"]
        assert len(role["rules"]) == 1, "nothing of other kinds: Kubernetes would give it to every editor, for everybody's objects"
    assert not {"create", "update", "patch", "delete"} & set(roles["fl-fairlead-view"]["rules"][0]["verbs"])


def test_helm_test_uses_an_existing_service_or_creates_a_tiny_one() -> None:
    own = template("--set=test.service=qwen", "--set=test.namespace=ml", "--set=test.keySecret.name=keys")
    assert not [one for one in own if one["kind"] == "InferenceService"]
    (pod,) = [one for one in own if one["kind"] == "Pod"]
    (container,) = pod["spec"]["containers"]
    assert pod["metadata"]["namespace"] == "ml" and container["command"] == ["fairlead", "verify"]
    assert container["args"] == ["http://qwen.ml.svc.cluster.local/v1", "--wait=900", "--api-key-file=/etc/fairlead/key/key"]
    (tiny,) = [one for one in template() if one["kind"] == "InferenceService"]
    service = InferenceService.parse(tiny)
    made = desired(service, Observed(), SETTINGS, datetime(2026, 1, 1, tzinfo=UTC)).objects
    (worker,) = [
        one["spec"]["template"]["spec"] for one in made if one["kind"] == "Deployment" and one["metadata"]["name"].endswith("worker")
    ]
    mounts = {one["name"] for one in worker["containers"][0]["volumeMounts"]}
    assert worker["initContainers"][0]["command"][:2] == ["fairlead", "make-model"] and "models" in mounts
    assert f"--model={service.spec.model.uri}" in worker["containers"][0]["args"]


def test_the_notes_name_what_was_left_out() -> None:
    done = helm("install", "fl", str(CHART), "--dry-run=client", "--set=monitoring.rules=true", "--set=monitoring.namespaces=null")
    assert done.returncode == 0, done.stderr
    notes = done.stdout.partition("NOTES:")[2]
    assert "NOT installed: the PrometheusRule" in notes and "helm test fl -n default" in notes and "set monitoring.namespaces" in notes


def test_the_operator_needs_no_more_than_the_chart_allows(server: apiserver.ApiServer, namespace: str) -> None:
    second = f"{namespace}-second"
    server.create("/api/v1/namespaces", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": second}})
    made = template("--set", f"watch.namespaces={{{namespace},{second}}}", "--namespace", namespace)
    access = [one for one in made if one["kind"] in ("ServiceAccount", "Role", "RoleBinding")]
    done = server.kubectl("apply", "-f", "-", stdin=yaml.safe_dump_all(access))
    assert done.returncode == 0, done.stderr
    (account,) = [one["metadata"]["name"] for one in access if one["kind"] == "ServiceAccount"]
    token = server.create(f"/api/v1/namespaces/{namespace}/serviceaccounts/{account}/token", {"spec": {}}, strict=False)["status"]["token"]
    config = json.loads(server.kubeconfig.read_text())
    config["users"][0]["user"]["token"] = token
    kubeconfig = server.kubeconfig.parent / f"{namespace}.kubeconfig"
    kubeconfig.write_text(json.dumps(config))
    router = StubRouter()
    try:
        (deployment,) = [one for one in made if one["kind"] == "Deployment" and one["metadata"]["name"] == account]
        flags = deployment["spec"]["template"]["spec"]["containers"][0]["args"]
        (lease,) = [flag.partition("=")[2] for flag in flags if flag.startswith("--lease-name=")]
        server_options = {"redis_url": f"redis://127.0.0.1:{free_port()}", "redis_bundled": True}
        own = next(flag.partition("=")[2] for flag in flags if flag.startswith("--credentials-secret="))
        server_options |= {"lease_name": lease, "credentials_secret": own, "deployment": account, "namespaces": f"{namespace},{second}"}
        with run_operator(kubeconfig, namespace, router.url, **server_options):
            cluster, other = Cluster(server, namespace), Cluster(server, second)
            cluster.create()
            other.create()
            eventually(lambda: other.get(*CHILDREN[0]))
            for secret in (own, "qwen-redis-worker", "qwen-redis-router"):
                eventually(lambda secret=secret: cluster.get("secrets", secret))
            for plural, name in CHILDREN:
                eventually(lambda plural=plural, name=name: cluster.get(plural, name))
            cluster.play_controllers()
            eventually(lambda: cluster.ready().get("status") == "True")
            eventually(lambda: [one for one in server.get(cluster.path("events"))["items"] if one["reason"] == "Serving"])
    finally:
        router.close()
    may = {
        verb: server.kubectl(f"--kubeconfig={kubeconfig}", "-n", namespace, "auth", "can-i", verb, "secrets").stdout.strip()
        for verb in ("create", "get", "list", "watch")
    }
    assert may == {"create": "yes", "get": "no", "list": "no", "watch": "no"}
