"""`fairlead convert`: every field of the CRD of 7e6be7f arrives under its present name, with a value that means the same."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from fairlead.convert.command import convert_manifest
from fairlead.convert.fields import FIELDS, NotConvertible, convert_spec
from fairlead.main import main
from fairlead_operator.api import InvalidManifest
from fairlead_operator.api.crd import custom_resource_definition

EARLIER = Path(__file__).parents[1] / "operator" / "data" / "crd-7e6be7f.yaml.gz"
EARLIER_SPEC: dict[str, Any] = {
    "model": {"cache": {"claim": "models"}},
    "disruption": {"maxUnavailable": 2},
    "engine": {
        "itlTargetMs": 30,
        "policy": "fcfs",
        "speculative": {"method": "draft", "numTokens": 3, "model": "pvc://models/draft"},
        "warmTokens": 99,
        "warmSeconds": 7,
        "attentionBackend": "flashinfer",
        "dtype": "bfloat16",
        "quantization": "none",
        "maxModelLen": 4096,
        "threads": 3,
        "prefillMaxRequests": 2,
    },
    "exposure": {
        "networkPolicy": False,
        "gateway": {"name": "public", "namespace": "infra", "sectionName": "https", "timeout": "1h30m", "hostnames": ["a.example"]},
    },
    "rollout": {
        "drainTimeout": "60s",
        "progressDeadline": "2h",
        "surgeTimeout": "1500ms",
        "canary": {"weight": 20, "pause": "5m", "maxErrorRate": 0.005, "maxTtftRatio": 1.25, "promote": "qwen-worker-1"},
    },
    "routing": {"holdTimeout": "1m", "steering": "Proxy", "metricsNames": "vLLM", "maxExpectedTtft": "2s500ms"},
    "scaling": {"min": 0, "max": 3, "idleAfter": "20m", "scaleDownStabilization": "2m", "target": {"ttft": "1s"}},
}
PRESENT_SPEC: dict[str, Any] = {
    "model": {"cache": {"persistentVolumeClaim": {"claimName": "models"}}},
    "podDisruptionBudget": {"maxUnavailable": 2},
    "engine": {
        "itlTargetMilliseconds": 30,
        "schedulingPolicy": "FirstComeFirstServed",
        "speculativeDecoding": {"method": "Draft", "numTokens": 3, "draftModelURI": "pvc://models/draft"},
        "warmupTokens": 99,
        "warmupTimeoutSeconds": 7,
        "attentionBackend": "FlashInfer",
        "dtype": "BFloat16",
        "maxModelLen": 4096,
        "threads": 3,
        "prefillMaxRequests": 2,
    },
    "exposure": {
        "networkPolicy": "None",
        "gateway": {
            "parentRef": {"name": "public", "namespace": "infra", "sectionName": "https"},
            "timeoutSeconds": 5400,
            "hostnames": ["a.example"],
        },
    },
    "rollout": {
        "drainTimeoutSeconds": 60,
        "progressDeadlineSeconds": 7200,
        "surgeTimeoutSeconds": 2,
        "canary": {
            "trafficPercent": 20,
            "analysisSeconds": 300,
            "maxErrorRateIncrease": "0.5%",
            "maxTTFTIncrease": "25%",
            "promotedRevision": "qwen-worker-1",
        },
    },
    "routing": {"holdTimeoutSeconds": 60, "metricsNames": "VLLM"},
    "slo": {"classes": [{"name": "default", "ttftMilliseconds": 2500}], "defaultClass": "default"},
    "scaling": {
        "minReplicas": 0,
        "maxReplicas": 3,
        "idleTimeoutSeconds": 1200,
        "scaleDown": {"stabilizationWindowSeconds": 120},
        "target": {"ttftMilliseconds": 1000},
    },
}


def manifest(spec: dict[str, Any], name: str = "qwen") -> dict[str, Any]:
    model = {"uri": "hf://a/b", **spec.get("model", {})}
    return {"apiVersion": "fairlead.dev/v1alpha1", "kind": "InferenceService", "metadata": {"name": name}, "spec": {**spec, "model": model}}


def schema_of(crd: dict[str, Any]) -> dict[str, Any]:
    """Path below spec → (type, enum) of each field that is no section."""
    found: dict[str, Any] = {}

    def walk(path: str, node: dict[str, Any]) -> None:
        for name, child in node.get("properties", {}).items():
            walk(f"{path}.{name}".lstrip("."), child)
        if not node.get("properties"):
            widened = "string" if node.get("x-kubernetes-int-or-string") else None  # takes every string that it took before
            found[path] = (node.get("type", widened), tuple(node.get("enum", ())))

    walk("", crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"])
    return found


def test_every_field_that_was_renamed_or_has_other_values_is_converted() -> None:
    before, now = schema_of(yaml.safe_load(gzip.decompress(EARLIER.read_bytes()))), schema_of(custom_resource_definition())
    changed = {path for path, kind in before.items() if path not in now or now[path][0] != kind[0] or not set(kind[1]) <= set(now[path][1])}
    converted = {field.before for field in FIELDS} | {"rollout.canary.pause", "routing.maxExpectedTtft"}
    assert not {path for path in changed if not any(path == one or path.startswith(f"{one}.") for one in converted)}


def test_each_value_keeps_its_meaning() -> None:
    given = json.loads(json.dumps(EARLIER_SPEC))
    made = convert_manifest(manifest(given))["spec"]
    assert made == PRESENT_SPEC | {"model": {"uri": "hf://a/b"} | PRESENT_SPEC["model"]}
    assert given == EARLIER_SPEC, "the input is not changed"
    assert convert_manifest(manifest(made))["spec"] == made, "a second conversion changes nothing"


@pytest.mark.parametrize(
    ("before", "now"),
    [
        ({"engine": {"maxModelLen": 0, "threads": 0, "prefillMaxRequests": 0, "itlTargetMs": 0, "dtype": "auto"}}, {}),
        ({"engine": {"policy": "lpm"}}, {"engine": {"schedulingPolicy": "LongestPrefixMatch"}}),
        ({"model": {"cache": {"hostPath": "/models"}}}, {"model": {"cache": {"hostPath": {"path": "/models"}}}}),
        ({"model": {"cache": {"size": "9Gi"}}}, {"model": {"cache": {"emptyDir": {"sizeLimit": "9Gi"}}}}),
        ({"rollout": {"canary": {"pause": "Manual"}}}, {"rollout": {"canary": {"promotion": "Manual"}}}),
        ({"exposure": {"networkPolicy": True}}, {}),
    ],
)
def test_earlier_defaults_and_alternatives(before: dict[str, Any], now: dict[str, Any]) -> None:
    model = {"uri": "hf://a/b", **now.get("model", {})}
    assert convert_manifest(manifest(before))["spec"] == {**now, "model": model}


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"routing": {"maxExpectedTtft": "1s"}, "slo": {"defaultClass": "batch"}}, r"spec\.routing\.maxExpectedTtft and spec\.slo"),
        ({"scaling": {"min": 1, "minReplicas": 2}}, r"spec\.scaling\.min and spec\.scaling\.minReplicas"),
        ({"scaling": {"idleAfter": "9d"}}, r"spec\.scaling\.idleAfter: '9d' is no duration such as 1h30m"),
        ({"engine": {"speculative": {"method": "ngram", "n": 1}}}, r"speculative\.n: the earlier section has .*model \(now engine\.spec"),
        ({"engine": {"speculative": "ngram"}}, r"spec\.engine\.speculative 'ngram': the earlier section has method"),
    ],
)
def test_what_cannot_be_converted_is_named(spec: dict[str, Any], words: str) -> None:
    with pytest.raises(NotConvertible, match=words):
        convert_spec(spec)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (
            {"scaling": {"idleAfter": 0, "max": 1}},
            r"spec\.scaling\.idleTimeoutSeconds \(earlier spec\.scaling\.idleAfter\): .* or equal to 1",
        ),
        ({"scaling": {"min": 1}}, r"spec\.scaling\.maxReplicas \(earlier spec\.scaling\.max\): is required"),
        ({"engine": {"speculative": {"method": "eagle"}}}, r"Decoding\.method \(earlier spec\.engine\.speculative\.method\): .*'eagle'"),
        ({"engine": {"speculative": {"method": "draft"}}}, r"draftModelURI \(earlier spec\.engine\.speculative\.model\) is required"),
    ],
)
def test_an_invalid_value_has_its_earlier_name_too(spec: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidManifest, match=words):
        convert_manifest(manifest(spec))


def test_empty_input_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As of a pipe whose first command failed."""
    (tmp_path / "nothing.yaml").write_text("")
    with pytest.raises(SystemExit) as ended:
        main(["convert", "-f", str(tmp_path / "nothing.yaml")])
    assert ended.value.code == 2 and "contains no InferenceService" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"metadata": 3}, "InferenceService: metadata must be a mapping (got 3)"),
        ({"metadata": {"name": "a", "annotations": [1]}}, "InferenceService a: metadata.annotations must be a mapping (got [1])"),
        ({"spec": [1]}, "InferenceService qwen: spec must be a mapping (got [1])"),
        ({"kind": "List", "items": 3}, "contains no InferenceService"),
        ({"kind": "List", "items": [3]}, "contains no InferenceService"),
    ],
)
def test_a_wrong_shape_is_named_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], wrong: dict[str, Any], words: str) -> None:
    file = tmp_path / "service.yaml"
    file.write_text(yaml.safe_dump(manifest({}) | wrong))
    with pytest.raises(SystemExit) as ended:
        main(["convert", "-f", str(file)])
    said = capsys.readouterr().err
    assert ended.value.code == 2 and words in said and said.count("\n") == 1


def test_a_list_from_kubectl_is_written_without_what_the_server_added(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stored = manifest({"scaling": {"min": 1, "max": 3}})
    applied = {"kubectl.kubernetes.io/last-applied-configuration": "{}"}
    stored["metadata"] |= {"uid": "u", "resourceVersion": "7", "generation": 3, "annotations": applied, "labels": {"team": "a"}}
    stored["status"] = {"replicas": 1}
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "s"}}
    file = tmp_path / "services.yaml"
    file.write_text(yaml.safe_dump_all([{"apiVersion": "v1", "kind": "List", "items": [stored]}, secret]))
    with pytest.raises(SystemExit) as ended:
        main(["convert", "-f", str(file)])
    assert ended.value.code == 0
    service, other = yaml.safe_load_all(capsys.readouterr().out)
    assert service["metadata"] == {"name": "qwen", "labels": {"team": "a"}} and "status" not in service and other == secret
    file.write_text(yaml.safe_dump(manifest({"engine": {"dtype": "int3"}})))
    with pytest.raises(SystemExit) as ended:
        main(["convert", "-f", str(file)])
    assert ended.value.code == 2 and "InferenceService qwen: spec.engine.dtype" in capsys.readouterr().err
