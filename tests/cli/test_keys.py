"""`fairlead keys`: a router can read what it writes."""

import hashlib
import stat
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from fairlead.errors import UserError
from fairlead.local.manifest import objects_of, read_manifest
from fairlead.local.up import print_urls
from fairlead.local.workloads import LocalSettings, workloads
from fairlead.main import main
from fairlead_operator.api import InferenceService
from fairlead_router.tenancy.tenants import digest, read_keys


def run(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["keys", *words])
    return int(ended.value.code or 0)


def test_a_new_key_is_printed_once_and_its_hash_is_in_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "keys.yaml"
    made = []
    for words in (["anna", "--tokens-per-minute", "60000", "--priority", "-2"], ["anna", "--name", "ci"], ["boris", "--weight", "2"]):
        assert run("new", *words, "--file", str(file)) == 0
        made.append(capsys.readouterr().out.strip())
    text = file.read_text()
    assert len(set(made)) == 3 and not any(key in text for key in made)
    assert all(key.startswith("fl-") and len(key) == 46 for key in made), "256 random bits"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    callers = read_keys(text.encode())
    first, second, third = (callers[digest(key.encode())] for key in made)
    assert (first.tenant.name, first.key, first.priority, first.tenant.rate) == ("anna", "key-1", -2, 1000)
    assert (second.tenant, second.key, second.priority) == (first.tenant, "ci", 0)
    assert third.tenant.weight == 2 and third.salt("") != first.salt("")
    assert run("check", str(file)) == 0
    assert "anna: 60000 tokens per minute" in capsys.readouterr().out
    assert hashlib.sha256(made[0].encode()).hexdigest() in text
    file.write_text(text.replace("priority: -2", "priority: -2\n      sloClass: chat"))
    assert run("check", str(file)) == 0
    assert "key-1 (priority -2, class chat)" in capsys.readouterr().out


def test_unusable_input_is_refused_and_the_file_is_unchanged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "keys.yaml"
    assert run("new", "anna", "--name", "ci", "-f", str(file)) == 0
    before = file.read_text()
    for words, says in (
        (["anna", "--name", "ci"], "has a key of this name"),
        (["no spaces"], "letters, digits"),
        (["b", "--priority", "9999"], "priority"),
    ):
        assert run("new", *words, "-f", str(file)) == 2
        assert says in capsys.readouterr().err
    assert file.read_text() == before
    assert run("new", "anna", "-f", str(tmp_path / "no folder" / "keys.yaml")) == 2
    said = capsys.readouterr()
    assert "cannot be written: No such file or directory" in said.err and not said.out
    file.write_text("tenants: 5")
    assert run("new", "anna", "-f", str(file)) == 2 and run("check", str(file)) == 2
    assert "tenants" in capsys.readouterr().err


def test_the_example_request_of_up_names_a_key_where_one_is_required(tmp_path: Path) -> None:
    written = StringIO()
    for access in ("", "access: {keysSecretRef: {name: qwen-keys}}"):
        file = tmp_path / "service.yaml"
        file.write_text(
            "apiVersion: fairlead.dev/v1alpha1\nkind: InferenceService\nmetadata: {name: qwen}\n"
            f"spec: {{model: {{uri: 'file:///m'}}, {access}}}\n"
        )
        print_urls(Console(file=written, width=500), {"qwen": "http://127.0.0.1:1"}, read_manifest(file))
    assert written.getvalue().count("Authorization: Bearer KEY") == 1


def test_local_mode_reads_the_key_file_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = {"model": {"uri": "file:///m"}, "access": {"keysSecretRef": {"name": "keys"}}}
    body = {
        "apiVersion": "fairlead.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": "chat", "namespace": "default"},
        "spec": spec,
    }
    made = workloads(objects_of(InferenceService.parse(body), redis_url=""), service="chat", router_port=1)
    router = next(one for one in made if one.component == "router")
    settings = LocalSettings(redis_url="", endpoints=tmp_path, logs=tmp_path)
    monkeypatch.delenv("FAIRLEAD_API_KEYS_FILE", raising=False)
    with pytest.raises(UserError, match="FAIRLEAD_API_KEYS_FILE"):
        router.flags(1, settings)
    monkeypatch.setenv("FAIRLEAD_API_KEYS_FILE", str(tmp_path / "keys.yaml"))
    assert router.flags(1, settings)[-2:] == ["--api-keys-file", str(tmp_path / "keys.yaml")]
