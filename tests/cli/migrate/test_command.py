"""`fairlead migrate`: inputs, refusals and exit statuses. Each message names the field of the source."""

import io
from pathlib import Path

import pytest
import yaml
from tests.cli.migrate.samples import DEPLOYMENT, ISVC, LLM, container, load, only

from fairlead.main import main
from fairlead.manifest_loader import load_documents
from fairlead.migrate.command import convert


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (DEPLOYMENT.replace("Qwen/Qwen3-8B", "ollama://llama"), "containers[1].args --model: 'ollama://llama': copy the model to a claim"),
        (ISVC.replace("huggingface", "sklearn"), "spec.predictor.model.modelFormat sklearn: only language models"),
        (ISVC.replace("URI", "https://x/m.tar"), "spec.predictor.model.storageUri: 'https://x/m.tar': copy the model to a claim"),
        (ISVC.replace("URI", "s3://${bucket}/m"), "spec.model.uri (from spec.predictor.model.storageUri) must be hf://"),
        (
            DEPLOYMENT.replace("memory: 64Gi", "memory: 64GB"),
            "spec.resources.memory (from spec.template.spec.containers[1].resources.limits.memory)",
        ),
        (DEPLOYMENT.replace('gpu: "2"', 'gpu: "0.5"'), 'nvidia.com/gpu: "0.5" is no number of whole GPUs'),
        (DEPLOYMENT.replace("--model=Qwen/Qwen3-8B", "--seed=1"), "no field names a model"),
        (DEPLOYMENT.replace("name: LEVEL", "name: a.b"), "spec.engine.env[1].name (from spec.template.spec.containers[1].env)"),
        (DEPLOYMENT.replace("a=org/a", "org/a"), '--lora-modules: "org/a {'),
        (LLM.replace("name: a, ", ""), "spec.model.lora.adapters[0].name must be a text (got null)"),
        (DEPLOYMENT.replace("replicas: 2", "replicas: two"), 'spec.replicas "two" is not of the type that Deployment has'),
        (DEPLOYMENT.replace("env:", "env: 3\n        other:"), "env must be a list of mappings (got 3)"),
    ],
)
def test_what_cannot_be_migrated_is_named_by_its_own_field(text: str, words: str) -> None:
    result = convert(load(text))
    assert result.failures == 1 and not result.documents and words in "\n".join(result.messages)


def run(capsys: pytest.CaptureFixture[str], *files: Path) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["migrate", *(word for file in files for word in ("-f", str(file)))])
    return int(str(ended.value.code)), *capsys.readouterr()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "nothing was migrated: found no objects; sources are KServe's"),
        ("a: [", "not YAML: line 1"),
        ("just text", 'contains "just text"'),
        ("kind: Deployment\nspec: {replicas: {{ .Values.n }}}", "line 2 has {{ … }}: it is a Helm template: render it first"),
        (DEPLOYMENT.replace("vllm/vllm-openai:v0.33.0", '"{{ .Values.image }}"'), "is a Helm template: render it first"),
        ("{apiVersion: v1, kind: List, items: []}", "nothing was migrated"),
        ("{apiVersion: x/v1, kind: Foo, metadata: {name: a}}", "Foo a: left out: not a source that is known"),
        ("{apiVersion: fairlead.dev/v1alpha1, kind: InferenceService, metadata: {name: a}}", "is Fairlead's already"),
        (container("{command: [redis-server]}"), "no container runs vLLM (registry/serve:1)"),
        (container("{image: null, command: [redis-server]}"), "no container runs vLLM (a container without image)"),
        (container("{command: [python3, -m, sglang.launch_server], image: lmsysorg/sglang:v1}"), "runs SGLang"),
        ("servingEngineSpec: {modelSpec: []}", "production-stack values: not migrated: servingEngineSpec.modelSpec has no model"),
        ("servingEngineSpec: {modelSpec: [{name: a, enabled: false}]}", "production-stack a: left out: it is not enabled"),
        ("modelArtifacts: {name: a}", "values with modelArtifacts: left out: only Helm values of production-stack"),
        ("{apiVersion: leaderworkerset.x-k8s.io/v1, kind: LeaderWorkerSet, metadata: {name: a}}", "a replica has several pods"),
    ],
)
def test_an_input_without_a_source_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, words: str) -> None:
    (tmp_path / "in.yaml").write_text(text)
    status, out, messages = run(capsys, tmp_path / "in.yaml")
    assert (status, out) == (2, "") and words in messages


def test_files_lists_and_failures_are_read_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    service = ISVC.replace("URI", "hf://org/llama")
    (tmp_path / "list.yaml").write_text(yaml.safe_dump({"apiVersion": "v1", "kind": "List", "items": [*load(DEPLOYMENT), *load(service)]}))
    (tmp_path / "bad.yaml").write_text(service.replace("huggingface", "sklearn"))
    status, out, _ = run(capsys, tmp_path / "list.yaml")
    assert status == 0 and [one["metadata"]["name"] for one in load(out)] == ["qwen", "llama"]
    assert "# From Deployment qwen. Not carried over" in out
    status, out, messages = run(capsys, tmp_path / "list.yaml", tmp_path / "bad.yaml")
    assert status == 1 and len(load(out)) == 2 and "InferenceService llama: not migrated: spec.predictor" in messages
    monkeypatch.setattr("sys.stdin", io.StringIO(service))
    status, out, _ = run(capsys, Path("-"))
    assert status == 0 and len(load(out)) == 1
    status, out, messages = run(capsys, tmp_path / "list.yaml", tmp_path / "list.yaml")
    assert status == 1 and "another source became InferenceService qwen too" in messages


@pytest.mark.parametrize(("given", "name"), [("Qwen2.5_7B", "qwen2-5-7b"), ("7b", "m-7b"), ("a" * 60, "a" * 52)])
def test_a_name_that_no_service_may_have_is_changed_and_listed(given: str, name: str) -> None:
    made, messages = only(ISVC.replace("URI", "hf://a/b").replace("name: llama", f"name: {given}").replace("--model_name=chat, ", ""))
    assert made["metadata"]["name"] == name and f"the InferenceService is named {name}" in messages
    assert made["spec"]["model"]["name"] == given, "clients send the same name"


@pytest.mark.parametrize("text", ["kind: Model\nspec: {}\nspec: {url: x}", "a: [{b: 1, b: 2}]", "env: 1\n'env': 2"])
def test_a_key_that_appears_twice_is_refused(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "f.yaml").write_text(text)
    with pytest.raises(SystemExit, match="2"):
        main(["migrate", "-f", str(tmp_path / "f.yaml")])
    assert "appears twice" in capsys.readouterr().err


def test_an_anchor_may_be_merged_and_overridden() -> None:
    assert load_documents("a: &x {b: 1, c: 2}\nd: {<<: *x, b: 3}") == [{"a": {"b": 1, "c": 2}, "d": {"b": 3, "c": 2}}]
