"""`fairlead up` for real: two workers and a router as processes, an `openai` client, and no process left behind."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from tests.cli.processes import find_marked, wait_until_gone
from tests.router.batch.deployment import create, line, results, wait

from fairlead.local.kubelet import free_port
from fairlead.main import main
from fairlead.random_model import make_model

MANIFEST = """
apiVersion: fairlead.dev/v1alpha1
kind: InferenceService
metadata: {name: small}
spec:
  model: {uri: "file:///models/small"}
  replicas: REPLICAS
  engine:
    kvCache: {pageTokens: 16, blockTokens: 16, pages: 512}
"""
STORY = "Once there was a ring that guided a rope to where it should run, and nobody noticed it until it was gone. " * 8
START_SECONDS = 120.0


@dataclass
class Up:
    """A running `fairlead up`."""

    url: str
    manifest: Path
    output: Path
    mark: str
    template: str = MANIFEST
    process: subprocess.Popen[str] = field(init=False)

    def scale(self, replicas: int) -> None:
        self.manifest.write_text(self.template.replace("REPLICAS", str(replicas)))

    def usable(self) -> list[str]:
        """Return the pods that the router can choose."""
        try:
            found: dict[str, Any] = httpx.get(f"{self.url}/fairlead/workers", timeout=5, trust_env=False).json()
        except httpx.HTTPError:
            return []
        return [worker["pod"] for worker in found["workers"] if worker["usable"] and worker["ready"]]

    def leaders(self) -> dict[str, int]:
        """Return pod name → process id of its leader."""
        found = {}
        for pid in find_marked(self.mark):
            with suppress(OSError):  # the process has ended
                words, variables = (Path(f"/proc/{pid}/{kind}").read_bytes().decode().split("\0") for kind in ("cmdline", "environ"))
                names = [each.partition("=")[2] for each in variables if each.startswith("FAIRLEAD_POD_NAME=")]
                if names and "--host" in words and os.getpgid(pid) == pid:  # its engine process has the same variables
                    found[names[0]] = pid
        return found

    def wait(self, condition: Callable[[], bool], seconds: float = START_SECONDS) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None, f"ended with {self.process.returncode}:\n{self.output.read_text()}"
            assert time.monotonic() < deadline, f"did not happen in {seconds} s:\n{self.output.read_text()}"
            time.sleep(0.1)


def start(
    directory: Path,
    replicas: int,
    *,
    wait: bool = True,
    python_path: Path | None = None,
    path: Path | None = None,
    more: str = "",
    flags: Sequence[str] = (),
) -> Up:
    """`python_path`, `path`: a folder put first for the processes. `more`: lines added to the spec."""
    manifest, output = directory / "small.yaml", directory / "output.txt"
    port = free_port(set())
    mark = str(directory)
    up = Up(f"http://127.0.0.1:{port}", manifest, output, mark, MANIFEST + more)
    up.scale(replicas)
    with output.open("w") as out:
        up.process = subprocess.Popen(
            [sys.executable, "-m", "fairlead", "up", "-f", str(manifest), "--port", str(port), "--model-root", str(directory), *flags],
            stdout=out,
            stderr=out,
            text=True,
            env={**os.environ, "MARK": mark, "TMPDIR": str(directory)}
            | {name: f"{first}:{os.environ.get(name, '')}" for name, first in (("PYTHONPATH", python_path), ("PATH", path)) if first},
            start_new_session=True,
        )
    if wait:
        up.wait(lambda: "/v1/chat/completions" in output.read_text())
    return up


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("up")
    make_model(root / "models" / "small", vocab=1024, max_positions=8192)
    return root


@pytest.fixture(scope="module")
def up(models: Path) -> Iterator[Up]:
    (models / "batches").mkdir()
    running = start(models, 2, more="  batch: {storageURI: 'pvc://batches'}\n")
    try:
        yield running
    finally:
        if running.process.poll() is None:
            running.process.kill()
            running.process.wait()


def ask(up: Up, text: str) -> tuple[str, int, int | None]:
    """Send one chat. Return the pod that answered, its cached tokens, and the predicted ones."""
    with closing(openai.OpenAI(base_url=f"{up.url}/v1", api_key="none", max_retries=0, timeout=60)) as client:
        raw = client.chat.completions.with_raw_response.create(
            model="small", messages=[{"role": "user", "content": text}], max_tokens=4, temperature=0, seed=1
        )
    usage = raw.parse().usage
    assert usage is not None and usage.completion_tokens >= 1 and usage.prompt_tokens_details is not None
    predicted = raw.headers.get("x-fairlead-predicted-tokens")
    return raw.headers["x-fairlead-pod"], usage.prompt_tokens_details.cached_tokens or 0, None if predicted is None else int(predicted)


def test_a_request_wakes_a_service_without_workers_and_ctrl_c_ends_its_stream_with_an_error(models: Path) -> None:
    """Ctrl-C leaves no process and no file."""
    running = start(models, 0, flags=("--stop-grace", "1"))
    try:
        running.wait(lambda: "spec.replicas is 0" in running.output.read_text())  # it follows the line that `start` waits for
        assert ask(running, "Hello")[0] == "small-worker-0" and len(find_marked(running.mark)) > 4
        running.manifest.unlink()
        running.wait(lambda: "was deleted or moved" in running.output.read_text())
        body = {"model": "small", "prompt": "Hello", "max_tokens": 8000, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{running.url}/v1/completions", json=body, timeout=60, trust_env=False) as answer:
            lines = (line for line in answer.iter_lines() if line.startswith("data: "))
            next(lines)
            running.process.send_signal(signal.SIGINT)
            last = list(lines)[-1]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "stream_cut", last
        assert running.process.wait(timeout=30) == 0, running.output.read_text()
        wait_until_gone(running.mark, seconds=1)
        assert not list(models.glob("fairlead-*/*")), running.output.read_text()
    finally:
        if running.process.poll() is None:
            running.process.kill()
            running.process.wait()


def test_a_repeated_prompt_is_answered_from_the_cache_of_the_same_pod(up: Up) -> None:
    pod, cached, _ = ask(up, STORY)
    assert cached == 0
    deadline = time.monotonic() + 10
    while True:  # the index is updated after the answer
        again, cached, predicted = ask(up, STORY)
        if predicted:
            break
        assert time.monotonic() < deadline, "the index never learned of the prompt"
    assert again == pod and cached >= predicted > 100


def test_a_stream_arrives_in_several_events(up: Up) -> None:
    with closing(openai.OpenAI(base_url=f"{up.url}/v1", api_key="none", max_retries=0)) as client:
        stream = client.chat.completions.create(
            model="small",
            messages=[{"role": "user", "content": "Hello"}],
            max_tokens=64,
            extra_body={"ignore_eos": True},
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = list(stream)
    assert len(chunks) > 4 and chunks[-1].usage is not None


def test_a_batch_runs_locally(up: Up) -> None:
    with closing(openai.OpenAI(base_url=f"{up.url}/v1", api_key="none", max_retries=0, timeout=60)) as client:
        batch = wait(client, create(client, [line(f"r{n}", model="small") for n in range(5)]))
        assert batch.status == "completed" and results(client, batch.output_file_id).keys() == {f"r{n}" for n in range(5)}
    assert (up.manifest.parent / "batches" / "files" / str(batch.output_file_id)).exists()


def test_verify_checks_a_stream_and_a_cache_hit(up: Up) -> None:
    """What `helm test` runs in its pod."""
    done = subprocess.run(
        [sys.executable, "-m", "fairlead", "verify", f"{up.url}/v1", "--wait=30"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    first, *_, last, verdict = done.stdout.splitlines()
    assert first.startswith("first:") and int(first.split()[1]) > 4 and " 0 of " in first
    cached, prompt = (int(last.split(" from the cache")[0].split()[place]) for place in (-5, -3))
    assert 0 < cached <= prompt and verdict == "the second hit the cache of the first"


def test_status_and_console_show_the_workers_and_the_url(
    up: Up, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(up.manifest.parent))
    printed = []
    for command in ("status", "console"):
        with pytest.raises(SystemExit, check=lambda ended: not ended.code):
            main([command])
        printed.append(capsys.readouterr().out)
    assert "small-worker-0" in printed[0] and "small-worker-1" in printed[0] and "Ready" in printed[0]
    assert printed[1] == f"{up.url}/ui\n" and f"  console: {up.url}/ui\n" in up.output.read_text()


def test_an_edited_file_scales_and_an_invalid_one_is_refused_with_the_field_named(up: Up) -> None:
    up.scale(3)
    up.wait(lambda: len(up.usable()) == 3)
    up.manifest.write_text(up.template.replace("REPLICAS", "3").replace("blockTokens: 16", "blockTokens: 24"))
    up.wait(lambda: "spec.engine.kvCache.blockTokens" in up.output.read_text())
    assert len(up.usable()) == 3
    up.scale(2)
    up.wait(lambda: len(up.usable()) == 2)


def test_requests_succeed_while_a_worker_is_killed_and_restarts(up: Up) -> None:
    before = up.leaders()
    victim, _, _ = ask(up, STORY)
    os.kill(before[victim], signal.SIGKILL)
    for number in range(6):
        pod, _, _ = ask(up, f"{number} {STORY}")
        assert pod in before
    up.wait(lambda: len(up.usable()) == 2 and up.leaders().get(victim, before[victim]) != before[victim])
    assert f"pod {victim}: killed by SIGKILL" in up.output.read_text()


def test_nothing_is_left_after_kill_9_of_the_command(up: Up) -> None:
    assert len(find_marked(up.mark)) > 5
    up.process.kill()
    up.process.wait()
    wait_until_gone(up.mark)


def test_a_worker_that_cannot_start_ends_the_command_with_the_cause(tmp_path_factory: pytest.TempPathFactory) -> None:
    # Not tmp_path: with this test's name in it, the path is too long for a unix socket.
    folder = tmp_path_factory.mktemp("no")
    (folder / "models" / "small").mkdir(parents=True)
    running = start(folder, 1, wait=False, more="    args: ['--chat-template=/none']\n")
    assert running.process.wait(timeout=START_SECONDS) == 1
    said = running.output.read_text()
    assert "pod small-worker-0: exit status" in said and "/none" in said and "Nothing is left running" in said, said
    wait_until_gone(running.mark, seconds=1)
