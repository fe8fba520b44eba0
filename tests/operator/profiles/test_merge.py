"""InferenceProfiles: the fields that a service takes from its profile, and what is refused."""

import json
from typing import Any

import pytest
from tests.operator.support.manifests import SETTINGS, manifest

from fairlead_operator.api import InferenceService, InvalidManifest
from fairlead_operator.api.crd import custom_resource_definition, profile_definition
from fairlead_operator.api.profile import OWN_FIELDS, find_own_fields
from fairlead_operator.children import worker
from fairlead_operator.profiles import ProfileNotFound, parse_service
from fairlead_operator.revisions import router_revision, worker_revision

CLAIM = {"name": "g", "resourceClaimTemplateName": "h"}


def profile(**spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "fairlead.dev/v1alpha1",
        "kind": "InferenceProfile",
        "metadata": {"name": "h100", "namespace": "default", "uid": "p", "resourceVersion": "1"},
        "spec": spec,
    }


def merged(service: dict[str, Any], shared: dict[str, Any]) -> InferenceService:
    return parse_service(manifest(profileRef={"name": "h100"}, **json.loads(json.dumps(service))), profile(**shared))


def worker_pod(one: InferenceService) -> Any:
    (deployment,) = [made for made in worker.objects(one, SETTINGS) if made["kind"] == "Deployment"]
    return deployment["spec"]["template"]


def test_a_service_takes_what_it_leaves_out_and_keeps_what_it_sets() -> None:
    shared = {
        "engine": {"maxNumSeqs": 64, "maxModelLen": 8192},
        "resources": {"gpuType": "H100", "memory": "64Gi"},
        "routing": {"replicas": 3},
    }
    one = merged({"engine": {"maxModelLen": 4096}, "resources": {"memory": "32Gi"}}, shared).spec
    assert (one.engine.max_num_seqs, one.engine.max_model_len) == (64, 4096), "maps are merged by key"
    assert (one.resources.gpu_type, one.resources.memory, one.routing.replicas) == ("H100", "32Gi", 3)


def test_defaults_that_the_api_server_wrote_do_not_hide_the_profile() -> None:
    """The stored service has every default of the CRD."""
    plain = manifest(profileRef={"name": "h100"})
    stored = InferenceService.parse(plain).spec.model_dump(mode="json", by_alias=True, exclude_none=True)
    assert stored["routing"]["replicas"] == 2
    shared = profile(routing={"replicas": 3}, rollout={"drainTimeoutSeconds": 600})
    one = parse_service({**plain, "spec": stored}, shared)
    assert one.spec.routing.replicas == 3 and one.spec.rollout.drain_timeout_seconds == 600
    assert one == parse_service(plain, shared)


def test_a_service_keeps_a_default_by_excluding_the_field_of_the_profile() -> None:
    shared = profile(
        routing={"replicas": 3},
        engine={"maxNumSeqs": 64, "dtype": "BFloat16"},
        podTemplate={"spec": {"nodeSelector": {"pool": "h100"}, "priorityClassName": "low"}},
    )
    before = json.dumps(shared)

    def parse(*excluded: str, **spec: Any) -> InferenceService:
        reference = {"name": "h100", **({"excludedFields": list(excluded)} if excluded else {})}
        return parse_service(manifest(profileRef=reference, **spec), shared)

    assert parse(routing={"replicas": 2}).spec.routing.replicas == 3, "the API server may have written it"
    one = parse("routing.replicas", "engine", "podTemplate.spec.nodeSelector", "access").spec
    assert (one.routing.replicas, one.engine.max_num_seqs, one.engine.dtype) == (2, 256, "Auto")
    assert one.pod_template is not None and one.pod_template.spec == {"priorityClassName": "low"}
    assert parse("engine.dtype").spec.engine.max_num_seqs == 64, "and nothing else is left out"
    assert parse("routing.replicas", routing={"replicas": 5}).spec.routing.replicas == 5
    assert worker_revision(parse("routing.replicas")) == worker_revision(parse()), "that restarts no worker"
    assert json.dumps(shared) == before


@pytest.mark.parametrize("path", ["routing.replica", "replicas", "engine.nodes", "routing.replicas.x", "podTemplat"])
def test_an_excluded_field_that_no_profile_has_is_named(path: str) -> None:
    with pytest.raises(InvalidManifest, match=rf"excludedFields names {path}, which no InferenceProfile has"):
        parse_service(manifest(profileRef={"name": "h100", "excludedFields": [path]}), profile())


def test_lists_merge_as_in_a_pod_template() -> None:
    shared = {
        "podTemplate": {
            "metadata": {"labels": {"team": "a", "tier": "gpu"}},
            "spec": {
                "tolerations": [{"key": "pool", "operator": "Exists"}],
                "nodeSelector": {"pool": "h100"},
                "containers": [{"name": "worker", "env": [{"name": "A", "value": "1"}, {"name": "B", "value": "1"}]}],
            },
        },
        "imagePullSecrets": [{"name": "shared"}],
        "slo": {"classes": [{"name": "chat", "priority": 5, "ttftMilliseconds": 500}, {"name": "agent"}]},
        "engine": {"args": ["--threads=3"]},
    }
    service = {
        "podTemplate": {
            "metadata": {"labels": {"team": "b"}},
            "spec": {
                "tolerations": [{"key": "spot", "operator": "Exists"}],
                "containers": [{"name": "worker", "env": [{"name": "B", "value": "2"}]}],
            },
        },
        "imagePullSecrets": [{"name": "own"}],
        "slo": {"classes": [{"name": "chat", "ttftMilliseconds": 900}]},
        "engine": {"args": ["--threads=4"]},
    }
    one = merged(service, shared)
    pod = worker_pod(one)
    assert {"team": "b", "tier": "gpu"}.items() <= pod["metadata"]["labels"].items()
    assert [each["key"] for each in pod["spec"]["tolerations"]] == ["nvidia.com/gpu", "pool", "spot"]
    assert pod["spec"]["nodeSelector"] == {"pool": "h100"}
    env = {each["name"]: each.get("value") for each in pod["spec"]["containers"][0]["env"]}
    assert (env["A"], env["B"]) == ("1", "2")
    assert pod["spec"]["imagePullSecrets"] == [{"name": "shared"}, {"name": "own"}]
    assert one.spec.slo is not None
    assert [(each.name, each.priority, each.ttft_milliseconds) for each in one.spec.slo.classes] == [("chat", 5, 900), ("agent", 0, None)]
    assert one.spec.engine.args == ["--threads=4"], "lists of arguments are replaced"


@pytest.mark.parametrize("in_profile", [True, False])
def test_null_in_a_pod_template_still_removes_a_default_of_the_operator(in_profile: bool) -> None:
    removing, other = {"spec": {"topologySpreadConstraints": None}}, {"spec": {"nodeSelector": {"a": "b"}}}
    ours, theirs = (removing, other) if in_profile else (other, removing)
    pod = worker_pod(merged({"podTemplate": theirs}, {"podTemplate": ours}))["spec"]
    assert "topologySpreadConstraints" not in pod and pod["nodeSelector"] == {"a": "b"}


@pytest.mark.parametrize(
    ("shared", "service"),
    [
        ({"model": {"cache": {"persistentVolumeClaim": {"claimName": "c"}}}}, {"model": {"cache": {"hostPath": {"path": "/models"}}}}),
        ({"engine": {"kvCache": {"size": "40Gi"}}}, {"engine": {"kvCache": {"pages": 7}}}),
        (
            {"resources": {"resourceClaims": [{"name": "g", "resourceClaimTemplateName": "h"}]}},
            {"resources": {"gpuResource": "amd.com/gpu"}},
        ),
        ({"podDisruptionBudget": {"maxUnavailable": 3}}, {"podDisruptionBudget": {"minAvailable": 2}}),
        ({"podDisruptionBudget": {"minAvailable": 2}}, {"podDisruptionBudget": {"maxUnavailable": 3}}),
        ({"router": {"tls": {"issuerRef": {"name": "i"}, "dnsNames": ["a.b"]}}}, {"router": {"tls": {"secretName": "s"}}}),
        ({"router": {"tls": {"secretName": "s"}}}, {"router": {"tls": {"issuerRef": {"name": "i"}}}}),
        ({"resources": {"gpuResource": "amd.com/gpu"}}, {"resources": {"gpus": 0}}),
        ({"resources": {"gpus": 0}}, {"resources": {"gpuResource": "amd.com/gpu"}}),
        ({"resources": {"gpuType": "H100"}}, {"resources": {"resourceClaims": [CLAIM]}}),
        ({"resources": {"gpuType": "H100"}}, {"resources": {"gpuResource": "gpu.intel.com/i915"}}),
        ({"resources": {"resourceClaims": [CLAIM]}}, {"resources": {"gpuType": "H100"}}),
        ({"resources": {"gpuResource": "gpu.intel.com/i915"}}, {"resources": {"gpuType": "H100"}}),
        (
            {"model": {"cache": {"persistentVolumeClaim": {"claimName": "c"}, "prefetch": "Enabled"}}},
            {"model": {"cache": {"hostPath": {"path": "/models"}}}},
        ),
        (
            {"model": {"cache": {"hostPath": {"path": "/models"}}, "secretRef": {"name": "s"}, "endpoint": "https://hub", "region": "eu"}},
            {"model": {"uri": "pvc://claim/model"}},
        ),
        ({"model": {"region": "eu"}}, {"model": {"uri": "hf://a/b"}}),
    ],
)
def test_a_choice_of_the_service_replaces_the_profiles(shared: dict[str, Any], service: dict[str, Any]) -> None:
    assert merged(service, shared).spec == InferenceService.parse(manifest(profileRef={"name": "h100"}, **service)).spec


def test_a_choice_that_excludes_nothing_keeps_the_profiles() -> None:
    one = merged({"resources": {"gpuType": "MI300X"}}, {"resources": {"gpuResource": "amd.com/gpu"}}).spec.resources
    assert (one.gpu_type, one.gpu_resource) == ("MI300X", "amd.com/gpu")
    cache = {"cache": {"hostPath": {"path": "/models"}}, "secretRef": {"name": "s"}, "region": "eu"}
    model = merged({"model": {"uri": "s3://bucket/model"}}, {"model": cache}).spec.model
    assert model.cache is not None and model.secret_ref is not None and model.region == "eu"


def test_an_empty_part_that_is_given_counts() -> None:
    assert merged({"rollout": {"canary": {}}}, {"engine": {"maxNumSeqs": 64}}).spec.rollout.canary is not None


def test_a_changed_profile_is_another_revision_of_what_it_shapes() -> None:
    before, after = merged({}, {"engine": {"maxNumSeqs": 64}}), merged({}, {"engine": {"maxNumSeqs": 65}})
    assert worker_revision(before) != worker_revision(after) and router_revision(before) == router_revision(after)
    plain = InferenceService.parse(manifest(engine={"maxNumSeqs": 64}))
    assert worker_revision(before) == worker_revision(plain), "moving fields into a profile restarts nothing"


@pytest.mark.parametrize(
    ("shared", "service", "words"),
    [
        ({"replicas": 3}, {}, "InferenceProfile h100: spec.replicas belongs to one service"),
        ({"model": {"uri": "hf://a/b"}}, {}, "InferenceProfile h100: spec.model.uri belongs to one service"),
        (
            {"engine": {"maxNumSeq": 3}},
            {},
            "InferenceProfile h100 and this service together: spec.engine.maxNumSeq: unknown field; did you mean",
        ),
        (
            {"resources": {"gpus": 2}},
            {"engine": {"tensorParallel": 4}},
            "together: spec.engine.tensorParallel must equal spec.resources.gpus",
        ),
        (
            {"routing": {"forwardingMode": "Redirect"}},
            {"access": {"keysSecretRef": {"name": "k"}}},
            "together: spec.routing.forwardingMode Redirect sends clients to workers",
        ),
    ],
)
def test_what_does_not_fit_together_names_the_profile_and_the_field(shared: dict[str, Any], service: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidManifest) as refused:
        merged(service, shared)
    assert words in str(refused.value)


def test_a_missing_profile_is_named_with_its_namespace() -> None:
    with pytest.raises(ProfileNotFound, match=r"InferenceProfile h100, which does not exist in namespace default: create it there"):
        parse_service(manifest(profileRef={"name": "h100"}), None)


def nodes(schema: dict[str, Any], path: str = "") -> dict[str, dict[str, Any]]:
    found = {path: schema}
    for name, child in schema.get("properties", {}).items():
        found |= nodes(child, f"{path}.{name}".lstrip("."))
    return found


def test_the_crd_has_the_fields_of_a_service_without_its_own_and_without_defaults() -> None:
    spec = "schema", "openAPIV3Schema", "properties", "spec"

    def fields(crd: dict[str, Any]) -> dict[str, dict[str, Any]]:
        schema = crd["spec"]["versions"][0]
        for name in spec:
            schema = schema[name]
        return nodes(schema)

    service, shared = fields(custom_resource_definition()), fields(profile_definition())
    gone = {path for path in service if any(path == own or path.startswith(f"{own}.") for own in OWN_FIELDS)}
    assert set(OWN_FIELDS) <= gone and shared.keys() == service.keys() - gone
    assert not [
        path for path, node in shared.items() if "default" in node or (path != "" and node.get("required") and node["type"] == "object")
    ]
    given: dict[str, Any] = {}
    for path in OWN_FIELDS:
        node = given
        *parents, last = path.split(".")
        for name in parents:
            node = node.setdefault(name, {})
        node.setdefault(last, 1)
    assert set(find_own_fields(given)) == set(OWN_FIELDS)
