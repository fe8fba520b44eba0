"""What `fairlead up` refuses before it starts anything: one line that names the problem, and no file left behind."""

import asyncio
import os
import socket
from contextlib import suppress
from pathlib import Path

import pytest
from tests.servers.redis_server import free_port

from fairlead.demo.command import MANIFEST, MODEL_PATH
from fairlead.errors import UserError
from fairlead.local.cluster import LocalCluster
from fairlead.local.manifest import objects_of, read_manifest
from fairlead.local.rundir import RunRecord, make_run_directory, remove_old_runs, remove_run_directory, runs_root, write_record
from fairlead.local.up import check_ports_free
from fairlead.main import main
from fairlead_operator.api import InferenceService

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\xff\xfe\x00", "not YAML"),
        (b"kind: InferenceService\napiVersion: fairlead.dev/v1alpha1\nmetadata: qwen\n", "metadata must be a mapping"),
        (b"kind: InferenceService\napiVersion: fairlead.dev/v1alpha1\nmetadata: {name: ../x}\n", "metadata.name must be"),
        (b"kind: InferenceService\napiVersion: fairlead.dev/v1alpha1\nmetadata: {name: x}\nspec: three\n", "document 1: line 4, spec: "),
        (b"kind: InferenceService\napiVersion: fairlead.dev/v9\nmetadata: {name: x}\n", "fairlead.dev/v9"),
    ],
)
def test_a_file_that_is_no_manifest_is_named(tmp_path: Path, content: bytes, words: str) -> None:
    file = tmp_path / "service.yaml"
    file.write_bytes(content)
    with pytest.raises(UserError) as refused:
        read_manifest(file)
    assert words in str(refused.value) and str(file) in str(refused.value)


def test_an_unknown_field_has_its_line_and_a_suggestion(tmp_path: Path) -> None:
    file = tmp_path / "service.yaml"
    head = "apiVersion: fairlead.dev/v1alpha1\nkind: InferenceService\nmetadata: {name: a}\nspec:\n"
    file.write_text(f"{head}  model: {{uri: 'file:///m'}}\n  replicsa: 2\n  engine:\n    kvCache: {{pageTokns: 4}}\n")
    with pytest.raises(UserError) as refused:
        read_manifest(file)
    assert "line 6, spec.replicsa: unknown field; did you mean replicas?" in str(refused.value)
    assert "line 8, spec.engine.kvCache.pageTokns" in str(refused.value)


@pytest.mark.parametrize(
    ("wrong", "right", "says"),
    [
        (
            "maxNumSeqs",
            "maxNumSeq",
            ": InferenceProfile small and InferenceService a together: document 1, line 5, spec.engine.maxNumSeq: unknown field; did",
        ),
        ("maxNumSeqs: 3", "maxNumSeqs: none", "document 1, line 5, spec.engine.maxNumSeqs: "),
        ("{engine:", "{replicas: 2, engine:", "InferenceProfile small: document 1, line 5, spec.replicas belongs to one service"),
        ("model: {uri", "model: {ur", "document 2: line 10, spec.model.uri: is required; line 10, spec.model.ur: unknown field"),
        ("metadata: {name: a}", "metadata: {nam: a}", "document 2: line 9, metadata.name is missing"),
        ("{engine: {", "{engine: {{", ": not YAML: line "),
        ("{engine: {", "{engine: \x01{", ": not YAML: unacceptable character #x0001: special characters are not allowed"),
        ("metadata: {name: small}", "metadata: small", ", document 1: line 4, metadata must be a mapping, not str"),
        ("metadata: {name: small}", "metadata: {nam: small}", ", document 1: line 4, metadata.name is missing: give the profile a name"),
        ("spec: {engine: {maxNumSeqs: 3}}", "spec: 3", ", document 1: line 5, spec must be a mapping, not int"),
    ],
)
def test_an_error_names_the_document_and_the_line_of_a_profile_or_a_service(tmp_path: Path, wrong: str, right: str, says: str) -> None:
    file = tmp_path / "service.yaml"
    file.write_text((PROFILE % "small").replace(wrong, right))
    with pytest.raises(UserError) as refused:
        read_manifest(file)
    assert str(refused.value).startswith(f"-f {file}") and says in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize("text", ["2026-01-01T00:00:00Z", "2026-01-01T00:00:00.5+02:00", "'2026-01-01T00:00:00Z'"])
def test_a_time_without_quotes_is_a_string_as_for_kubectl(tmp_path: Path, text: str) -> None:
    file = tmp_path / "service.yaml"
    head = "apiVersion: fairlead.dev/v1alpha1\nkind: InferenceService\nmetadata: {name: a, annotations: {day: 2026-01-01}}\n"
    file.write_text(f"{head}spec:\n  model: {{uri: 'file:///m'}}\n  rollout:\n    restartedAt: {text}\n")
    (service,) = read_manifest(file).services
    assert service.spec.rollout.restarted_at == text.strip("'")


PROFILE = """
apiVersion: fairlead.dev/v1alpha1
kind: InferenceProfile
metadata: {name: small}
spec: {engine: {maxNumSeqs: 3}}
---
apiVersion: fairlead.dev/v1alpha1
kind: InferenceService
metadata: {name: a}
spec: {model: {uri: "file:///m"}, profileRef: {name: %s}}
"""


def test_a_profile_of_the_same_file_applies_and_another_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "service.yaml"
    file.write_text(PROFILE % "small")
    manifest = read_manifest(file)
    assert [one.spec.engine.max_num_seqs for one in manifest.services] == [3] and not manifest.skipped
    worker = next(
        one
        for one in objects_of(manifest.services[0], redis_url="")
        if one["kind"] == "Deployment" and one["metadata"]["name"] == "a-worker"
    )
    assert "--max-num-seqs=3" in worker["spec"]["template"]["spec"]["containers"][0]["args"]
    file.write_text(PROFILE % "large")
    with pytest.raises(
        UserError, match=r"document 2: line 10, spec\.profileRef names InferenceProfile large.*\(it has: small\): add it as a document"
    ):
        read_manifest(file)


def test_a_second_run_on_a_port_names_the_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        write_record(make_run_directory("a"), RunRecord(os.getpid(), "fairlead up -f /a.yaml", {"a": f"http://127.0.0.1:{port}"}))
        with pytest.raises(UserError, match=rf"`fairlead up -f /a\.yaml` \(process {os.getpid()}\) uses it"):
            check_ports_free(port, 1)


def test_cluster_only_objects_are_skipped_with_a_notice() -> None:
    """A claim beside the service does not prevent a local run; a file with nothing else is refused with its kinds named."""
    found = read_manifest(EXAMPLES / "cache.yaml")
    assert [service.name for service in found.services] == ["qwen"] and found.skipped == ("PersistentVolumeClaim",)
    with pytest.raises(UserError, match="contains no InferenceService, only InferencePool, HTTPRoute, Service, Deployment, which need a"):
        read_manifest(EXAMPLES / "inference-pool.yaml")


def test_a_misspelt_service_is_not_skipped(tmp_path: Path) -> None:
    file = tmp_path / "service.yaml"
    file.write_text("apiVersion: fairlead.dev/v1alpha1\nkind: Inferenceservice\nmetadata: {name: a}\n")
    with pytest.raises(UserError, match="kind 'Inferenceservice'; local mode runs InferenceService only"):
        read_manifest(file)


def test_gateways_canaries_and_tls_are_skipped_locally() -> None:
    """Routers of two services would need the same picker port, and a canary's weights and a certificate come from the cluster."""
    variable = {"spec": {"containers": [{"name": "router", "env": [{"name": "TZ", "value": "UTC"}]}]}}
    spec = {
        "model": {"uri": "file:///m"},
        "rollout": {"canary": {}, "drainTimeoutSeconds": 7},
        "exposure": {"gateway": {"parentRef": {"name": "web"}, "backend": "EndpointPicker"}},
        "router": {"tls": {"secretName": "llm"}, "autoscaling": {"maxReplicas": 4}, "podTemplate": variable},
    }
    service = InferenceService.parse({"metadata": {"name": "qwen"}, "spec": spec})
    made = [one for one in objects_of(service, redis_url="unix:///r") if one["kind"] == "Deployment"]
    containers = [one["spec"]["template"]["spec"]["containers"][0] for one in made]
    flags = [arg for one in containers for arg in one["args"]]
    assert not [flag for flag in flags if flag.startswith(("--picker-port", "--canary-file", "--ssl"))] and "--drain-timeout=7" in flags
    assert [one["name"] for one in containers if {"name": "TZ", "value": "UTC"} in one["env"]] == ["router"], "other settings stay"


def test_ports_above_65535_are_refused() -> None:
    with pytest.raises(UserError, match="--port 65535: 2 services need the ports up to 65536; choose at most 65534"):
        check_ports_free(65535, 2)


async def test_a_run_that_never_started_leaves_no_directory(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(short_path))
    monkeypatch.setattr("fairlead.local.redis.find_redis_server", lambda: None)
    cluster = LocalCluster("qwen", port=1, host_env={}, cpus=1)
    with pytest.raises(UserError, match="redis-server"):
        async with cluster:
            pass
    assert not cluster.directory.exists()


async def test_a_pod_that_is_not_ready_in_time_is_named_with_its_log(
    tmp_path: Path, short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks the whole message of the demo and of `fairlead up`, which was once empty."""
    monkeypatch.setattr("tempfile.tempdir", str(short_path))
    cluster = LocalCluster("demo", port=free_port(), host_env=dict(os.environ), cpus=1, model_root=tmp_path)
    (tmp_path / MODEL_PATH).mkdir(parents=True)
    with pytest.raises(TimeoutError) as ended:
        async with cluster:
            cluster.apply(read_manifest(MANIFEST))
            await cluster.wait_ready(0.01)
    said = str(ended.value)
    assert "within --ready-timeout 0.01 s" in said and "demo-worker-0: " in said and f"logs: {cluster.directory}/logs" in said


@pytest.mark.parametrize(
    ("flag", "value"),
    [("--port", "0"), ("--ready-timeout", "0"), ("--ready-timeout", "nan"), ("--stop-grace", "-1"), ("--stop-grace", "nan")],
)
def test_impossible_numbers_are_refused_with_the_flag_named(flag: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["up", "-f", "no-matter.yaml", f"{flag}={value}"])
    assert ended.value.code == 2 and f"{flag} {value}: must be" in capsys.readouterr().err


def test_a_model_that_is_not_found_is_named_immediately(
    tmp_path: Path, short_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(short_path))
    file = tmp_path / "service.yaml"
    file.write_text(
        "apiVersion: fairlead.dev/v1alpha1\nkind: InferenceService\nmetadata: {name: qwen}\nspec: {model: {uri: 'file:///no/such/model'}}\n"
    )
    with pytest.raises(SystemExit) as ended:
        main(["up", "-f", str(file), "--port", str(free_port())])
    said = capsys.readouterr().err
    assert ended.value.code == 2 and "/no/such/model, which does not exist on this machine: create it" in said and "--model-root" in said
    assert [path.name for path in runs_root().iterdir()] == []


def test_files_of_old_runs_are_removed_and_those_of_live_runs_are_not(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(short_path))
    killed, alive, fresh = (make_run_directory("qwen") for _ in range(3))
    write_record(killed, RunRecord(pid=2**22 + 1, command="a", urls={}))
    write_record(alive, RunRecord(pid=os.getpid(), command="a", urls={}))
    for old in (killed, alive):
        os.utime(old, (0, 0))
    remove_old_runs()
    assert sorted(runs_root().iterdir()) == sorted([alive, fresh])


def test_files_go_with_the_run_even_while_its_last_process_writes(
    short_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(short_path))
    directory = make_run_directory("qwen")

    def write() -> None:
        for number in range(300):
            with suppress(FileNotFoundError):
                (directory / "tmp" / "kernels").mkdir(parents=True, exist_ok=True)
                (directory / "tmp" / "kernels" / str(number)).touch()

    async def run() -> None:
        writing = asyncio.create_task(asyncio.to_thread(write))
        await asyncio.sleep(0)  # let it start
        await remove_run_directory(directory)
        await writing
        await remove_run_directory(directory)

    asyncio.run(run())
    assert not directory.exists() and not caplog.records
    monkeypatch.setattr("fairlead.local.rundir.REMOVE_SECONDS", 0)
    directory.write_text("not a directory")
    asyncio.run(remove_run_directory(directory))
    assert f"{directory} is left, remove it: " in caplog.text


def test_a_run_directory_that_others_may_enter_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The embedded Redis has no password: its socket lies in a directory of mode 0700."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert make_run_directory("qwen").stat().st_mode & 0o077 == 0
    runs_root().chmod(0o755)
    with pytest.raises(UserError, match="mode 0700"):
        make_run_directory("qwen")
