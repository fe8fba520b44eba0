"""vLLM and SGLang in local mode: ports of their own, what is missing, and a service with a stand-in for vLLM."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.agent.stand_in_engine import write_model

from fairlead.errors import UserError
from fairlead.local.containers import PodIdentity
from fairlead.local.engine import EnginePorts, engine_command, engine_container, find_engine
from fairlead.local.kubelet import free_port
from fairlead.main import main

PORTS = EnginePorts(21, 22, 23)
CONFIG = {"publisher": "zmq", "endpoint": "tcp://127.0.0.1:5557", "replay_endpoint": "tcp://127.0.0.1:5558"}
ENGINE: dict[str, Any] = {
    "name": "engine",
    "restartPolicy": "Always",
    "command": ["sh", "serve"],
    "args": ["/mnt/model", "--port=8100", f"--kv-events-config={json.dumps(CONFIG)}", "--lora-modules", "sql=/mnt/adapters/0", "--seed=1"],
    "env": [{"name": "HOME", "value": "/tmp"}, {"name": "DO_NOT_TRACK", "value": "1"}],
    "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
}


def test_an_engine_gets_local_ports_and_paths() -> None:
    template = {"spec": {"initContainers": [{"name": "prefetch"}, ENGINE], "containers": [{"name": "agent"}]}}
    engine = engine_container(template)
    assert engine is ENGINE
    command, env = engine_command(engine, PodIdentity("pod", "default"), PORTS, {}, {"/tmp"}, lambda path: f"/here{path}")
    assert command[1:] == [
        "serve",
        "/here/mnt/model",
        "--port=21",
        "--kv-events-config=" + json.dumps({**CONFIG, "endpoint": "tcp://127.0.0.1:22", "replay_endpoint": "tcp://127.0.0.1:23"}),
        "--lora-modules",
        "sql=/here/mnt/adapters/0",
        "--seed=1",
    ]
    assert Path(command[0]).is_absolute()
    assert env == {"DO_NOT_TRACK": "1"}, "HOME stays this machine's"
    assert PORTS.agent_flags == [
        *("--engine-url", "http://127.0.0.1:21"),
        *("--kv-events", "tcp://127.0.0.1:22"),
        *("--kv-replay", "tcp://127.0.0.1:23"),
    ]


def test_a_worker_of_fairlead_has_no_engine_container() -> None:
    assert engine_container({"spec": {"containers": [{"name": "worker"}]}}) is None


@pytest.mark.parametrize(("command", "name"), [(("vllm", "serve"), "vllm"), (("python3", "-m", "sglang.launch_server"), "sglang")])
def test_a_missing_engine_is_named_with_what_to_install(command: tuple[str, ...], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UserError, match=f"{name} is not installed: install it in this environment"):
        find_engine(command)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["MODEL", "--runtime", "vllm"], "vllm is not installed: install it"),
        (["MODEL", "--runtime", "other"], "'other' is not one of"),
    ],
)
def test_serve_refuses_an_engine_that_it_cannot_run(
    words: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    folder = write_model(tmp_path / "model")
    (folder / "model.safetensors").write_bytes(b"")
    with pytest.raises(SystemExit) as ended:
        main(["serve", *(str(folder) if word == "MODEL" else word for word in words)])
    assert ended.value.code == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "says"),
    [
        ("--served_model_name=x", "the router and the agent in front of it set it"),
        ("--kv-events-config.endpoint=x", "the router and the agent in front of it set it"),
        ("--disable-log-stats", "reads the load from the engine's metrics"),
        ("--data_parallel_size=2", "give --replicas instead"),
    ],
)
def test_serve_refuses_flags_of_the_engine_that_the_agent_relies_on(
    flag: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "vllm"
    program.write_text("#!/bin/sh\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    folder = write_model(tmp_path / "model")
    (folder / "model.safetensors").write_bytes(b"")
    with pytest.raises(SystemExit) as ended:
        main(["serve", str(folder), "--runtime", "vllm", flag])
    assert ended.value.code == 2
    assert f"{flag.partition('=')[0]}: not with --runtime vllm, because " in (said := capsys.readouterr().err)
    assert says in said


@pytest.mark.parametrize("words", [["-tp", "2"], ["-tp=2"]])
def test_a_short_flag_of_the_engine_is_not_read_as_the_port(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", "./model", "--runtime", "vllm", *words])
    assert ended.value.code == 2
    assert "fairlead serve: -tp: write the flag's long name" in capsys.readouterr().err


def test_serve_runs_vllm_behind_a_router(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    (folder / "model.safetensors").write_bytes(b"")
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "vllm"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m tests.agent.stand_in_engine "$@"\n')
    agent = tmp_path / "bin" / "fairlead-agent"  # where the environment was installed by an earlier release
    agent.write_text(f'#!/bin/sh\nexec {sys.executable} -m fairlead_agent.main "$@"\n')
    for script in (program, agent):
        script.chmod(0o755)
    port = free_port(set())
    env = {**os.environ, "PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "fairlead", "serve", str(folder), "--runtime", "vllm", "--port", str(port), "--max-model-len", "4096"]
    with (tmp_path / "out").open("wb") as out:
        served = subprocess.Popen(command, env=env, stdout=out, stderr=out, cwd=tmp_path)
    try:
        url, give_up = f"http://127.0.0.1:{port}", time.monotonic() + 90
        while True:
            assert served.poll() is None and time.monotonic() < give_up, (tmp_path / "out").read_text()
            try:
                if httpx.get(f"{url}/ready").status_code == 200:
                    break
            except httpx.HTTPError:
                pass
            time.sleep(0.2)
        body = {"model": "model", "prompt": "one two three four five six seven"}
        answers = [httpx.post(f"{url}/v1/completions", json=body, timeout=30) for _ in range(2)]
        assert [answer.status_code for answer in answers] == [200, 200], answers[0].text
        assert int(answers[1].headers["x-fairlead-cached-tokens"]) > 0
    finally:
        served.send_signal(signal.SIGINT)
        assert served.wait(40) == 0, (tmp_path / "out").read_text()
