"""kubeconform finds no unknown or mistyped field in any variant of the chart, by the schemas that a real API server serves."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.operator.chart.test_variants import objects, variants
from tests.operator.support import apiserver
from tests.operator.support.chart import CHART
from tests.operator.support.openapi import LOCATION, write_schemas

EXAMPLES = sorted((CHART.parents[1] / "examples").glob("*.yaml"))

FOREIGN = ("monitoring.coreos.com/", "gateway.networking.k8s.io/", "inference.networking.k8s.io/")
"""Groups whose CRDs belong to other projects."""


@pytest.fixture(scope="module")
def schemas(server: apiserver.ApiServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    if apiserver.program("kubeconform") is None:
        pytest.skip("kubeconform not found: run `make kubernetes` once (root on Debian, Go 1.26; minutes)")
    folder = tmp_path_factory.mktemp("schemas")
    assert write_schemas(server, folder) > 100
    yield folder


def check(schemas: Path, documents: list[dict[str, Any]]) -> dict[str, Any]:
    command = [str(apiserver.program("kubeconform")), "-strict", "-output=json", "-summary", f"-schema-location={schemas}/{LOCATION}"]
    known = [each for each in documents if not each["apiVersion"].startswith(FOREIGN)]
    text = "\n---\n".join(map(json.dumps, known))  # PyYAML writes the string 1e3 without quotes, and others read a number
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=60)
    result: dict[str, Any] = json.loads(done.stdout)
    assert result["summary"]["skipped"] == 0 and result["summary"]["errors"] == 0, done.stdout + done.stderr
    return result


@variants
def test_every_field_of_each_variant_is_in_the_schema(schemas: Path, variant: str) -> None:
    result = check(schemas, objects(variant))
    assert result["summary"]["invalid"] == 0 and result["summary"]["valid"] > 0, result


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_every_field_of_the_examples_is_in_the_schema(schemas: Path, example: Path) -> None:
    assert check(schemas, [each for each in yaml.safe_load_all(example.read_text()) if each])["summary"]["invalid"] == 0


@pytest.mark.parametrize(
    ("kind", "path", "value"),
    [
        ("Deployment", ("spec", "template", "spec", "containers", 0, "imagePullPolici"), "Always"),
        ("Deployment", ("spec", "replicas"), "two"),
        ("NetworkPolicy", ("spec", "ingres"), []),
        ("InferenceService", ("spec", "modle"), {}),
        ("ClusterRole", ("rules", 0, "verb"), ["get"]),
    ],
)
def test_a_wrong_field_is_found(schemas: Path, kind: str, path: tuple[Any, ...], value: Any) -> None:
    made = objects("everything")
    target: Any = next(each for each in made if each["kind"] == kind)
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = value
    assert check(schemas, made)["summary"]["invalid"] == 1
