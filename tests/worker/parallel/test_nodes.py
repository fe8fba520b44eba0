"""A model over two nodes (processes on the loopback interface): its answers, the admission of nodes, and its end."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.lora import save_adapter
from tests.worker.api.process import WorkerProcess, until
from tests.worker.parallel.test_worker import FLAGS, children, gone, loads, plain, said, told

from fairlead.random_model.build import make_model
from fairlead_worker.config import WorkerConfig

SECRET = "sixteen characters"
UPDATING = {"FAIRLEAD_ALLOW_RUNTIME_LORA_UPDATING": "true"}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as made:
        return int(made.getsockname()[1])


class OtherNode:
    """`fairlead-worker` as a node other than the leader."""

    def __init__(self, model: Path, folder: Path, *flags: str, secret: str = SECRET, **variables: str) -> None:
        folder.mkdir(exist_ok=True)
        self.log, self.termination_log = folder / "log", folder / "termination"
        command = [
            sys.executable,
            "-m",
            "fairlead_worker.main",
            "--model",
            f"file://{model}",
            "--kv-pages",
            "600",
            *FLAGS,
            *flags,
        ]
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("FAIRLEAD_", "LWS_"))}
        environment |= {"FAIRLEAD_POD_NAME": folder.name, "FAIRLEAD_TERMINATION_LOG": str(self.termination_log)}
        environment |= {"FAIRLEAD_NODES_SECRET": secret, **variables}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, cwd=folder, start_new_session=True)

    def ended(self, seconds: float = 120) -> tuple[int, str]:
        """Exit status, and the last words."""
        status = self.process.wait(seconds)
        return status, self.termination_log.read_text() if self.termination_log.exists() else ""

    def says(self, pattern: str) -> None:
        until(lambda: re.search(pattern, self.log.read_text()), pattern)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "tiny", "qwen3", vocab=1024, layers=2, dtype="float32")


class Nodes:
    """Starts leaders and others, and ends what is left of them."""

    def __init__(self, model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("LWS_GROUP_SIZE", raising=False)
        self._model, self._folder = model, folder
        self.address = f"127.0.0.1:{free_port()}"
        self._leaders: list[WorkerProcess] = []
        self._others: list[OtherNode] = []

    def leader(self, *flags: str) -> WorkerProcess:
        folder = self._folder / "leader"
        folder.mkdir(exist_ok=True)
        flags = (*FLAGS, "--nnodes", "2", "--master-addr", self.address, *flags)
        variables = {"FAIRLEAD_NODES_SECRET": SECRET, **UPDATING}
        self._leaders.append(WorkerProcess(self._model, folder, *flags, cwd=folder, **variables))
        return self._leaders[-1]

    def other(self, *flags: str, name: str = "other", secret: str = SECRET, **variables: str) -> OtherNode:
        if not variables:
            flags = ("--nnodes", "2", "--node-rank", "1", "--master-addr", self.address, *flags)
        self._others.append(OtherNode(self._model, self._folder / name, *flags, secret=secret, **UPDATING, **variables))
        return self._others[-1]

    def end(self) -> None:
        for leader in self._leaders:
            leader.kill()
        for other in self._others:
            other.process.kill()
            other.process.wait()


@pytest.fixture
def nodes(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Nodes]:
    made = Nodes(model, tmp_path, monkeypatch)
    yield made
    made.end()


WRONG = [
    (("--nnodes", "4", "--tensor-parallel-size", "4"), SECRET, "it is node 1 of 4, and the leader's --nnodes is 2"),
    (("--page-size", "32"), SECRET, "its flags are not the leader's: --page-size 32, 16 at the leader"),
    ((), "another secret, as long", "rejects this node's secret: set FAIRLEAD_NODES_SECRET to the same value"),
]


OWN = "file:///proc/self/cwd"
"""A folder that is another one on each node, as the same path is on two machines."""
ADAPTERS = ("--lora-modules", f"first={OWN}/first")


def place(model: Path, folder: Path) -> dict[str, str]:
    """Adapters in the folders of both nodes: the same, and two that are not. What each says to PROMPT."""
    answers = {}
    for seed, name in enumerate(("first", "second", "third")):
        answers[name] = said(model, save_adapter(plain(model), folder / "leader" / name, seed))
        shutil.copytree(folder / "leader" / name, folder / "other" / name)
    config = folder / "other" / "second" / "adapter_config.json"
    config.write_text(config.read_text() + " ")
    shutil.rmtree(folder / "other" / "third")
    shutil.copytree(folder / "other" / "first", folder / "other" / "fourth")
    return answers


def test_two_nodes_answer_as_one_others_are_refused_and_a_lost_rank_ends_both_with_its_name(
    model: Path, nodes: Nodes, tmp_path: Path
) -> None:
    answers = place(model, tmp_path)
    leader = nodes.leader(*ADAPTERS)
    waits = until(lambda: (told := leader.client.get("/ready").json()).get("stage") == "Waiting" and told, "a leader that waits")
    assert "waits for node 1 of 2" in waits["reason"]
    wrong = [nodes.other(*ADAPTERS, *flags, name=f"wrong-{number}", secret=secret) for number, (flags, secret, _) in enumerate(WRONG)]
    for one, (_, _, words) in zip(wrong, WRONG, strict=True):
        status, last_words = one.ended()
        assert status == 1 and words in last_words
    until(lambda: " was refused: " in leader.client.get("/ready").json()["reason"], "the leader's words on them")

    host, _ = nodes.address.split(":")  # late, and waited for
    other = nodes.other(*ADAPTERS, LWS_LEADER_ADDRESS=host, LWS_GROUP_SIZE="2", LWS_WORKER_INDEX="1", FAIRLEAD_MASTER_ADDR=nodes.address)
    want = said(model, plain(model))
    leader.wait_ready()
    cold, warm = told(leader), told(leader)
    assert cold == (want, 0) and warm[0] == want and warm[1] > 0
    assert told(leader, model="first")[0] == answers["first"]

    # Each node has fetched its own by itself: what differs, or is not on all of them, is served by none.
    status, why = loads(leader, "second", f"{OWN}/second")
    assert status == 400 and "rank 1 of 2 has read other files than rank 0" in why
    status, why = loads(leader, "third", f"{OWN}/third")
    assert status == 400 and "node 1 of 2 (other): there is no /proc/self/cwd/third" in why
    status, why = loads(leader, "fourth", f"{OWN}/fourth")
    assert status == 404 and "there is no /proc/self/cwd/fourth" in why and "node" not in why
    assert leader.post("/v1/unload_lora_adapter", lora_name="first").status_code == 200
    assert loads(leader, "again", f"{OWN}/first")[0] == 200
    assert told(leader, model="again")[0] == answers["first"] and told(leader)[0] == want

    ranks = children(other.process.pid)
    assert len(ranks) == 1
    with leader.stream("/v1/completions", prompt="x", max_tokens=3000, ignore_eos=True) as (_, events):
        next(events)
        os.kill(ranks[0], signal.SIGKILL)
        *_, last = events
    words = "node 1 of 2 (other): rank 1 of 2 was ended by SIGKILL"
    assert isinstance(last, dict) and words in last["error"]["message"]
    assert leader.wait() == 1 and words in leader.termination_log.read_text()
    assert other.ended() == (1, "rank 1 of 2 was ended by SIGKILL; out of memory?")


@pytest.mark.parametrize("killed", ["other", "leader", "none, and the other hangs"])
def test_a_node_that_is_gone_or_silent_ends_the_group(nodes: Nodes, killed: str) -> None:
    leader, other = nodes.leader(), nodes.other()
    other.says("as node 1 of 2")
    ranks = until(lambda: children(other.process.pid), "its ranks")
    if killed != "leader":
        other.says("connected to the leader's steps")
        other.process.send_signal(signal.SIGKILL if killed == "other" else signal.SIGSTOP)
        assert leader.wait() == 1
        assert "node 1 of 2 (other) is gone, or the network to it" in leader.termination_log.read_text()
    else:
        leader.kill()
        status, words = other.ended()
        assert status == 1 and f"lost the connection to the leader at {nodes.address}" in words
    other.process.send_signal(signal.SIGCONT)
    until(lambda: all(map(gone, ranks)), "the end of its ranks", 60)


def test_a_stop_ends_both_in_order_and_a_sigterm_of_the_other_waits_for_the_leader(nodes: Nodes) -> None:
    leader, other = nodes.leader(), nodes.other()
    leader.wait_ready()
    other.process.send_signal(signal.SIGTERM)
    other.says("SIGTERM: this node continues until the leader")
    assert leader.complete(prompt="x", max_tokens=2)["choices"]
    assert leader.stop() == 0
    assert other.ended() == (0, "")


def test_a_node_without_a_leader_ends_at_once(nodes: Nodes) -> None:
    other = nodes.other()
    other.says("node 1 of 2 waits for the leader")
    other.process.send_signal(signal.SIGTERM)
    assert other.ended() == (0, "")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--nnodes=2"], "--nnodes 2 needs --master-addr HOST"),
        (["--nnodes=3", "--master-addr=a:1"], "--tensor-parallel-size 2 is not a multiple of --nnodes 3"),
        (["--nnodes=2", "--master-addr=a:1", "--node-rank=2"], "--node-rank 2 is not below --nnodes 2"),
        (["--nnodes=2", "--master-addr=a:1"], "set FAIRLEAD_NODES_SECRET to the same 16 characters or more"),
        (["--master-addr=a:1"], "give --nnodes too"),
        (["--nnodes=2", "--master-addr=a:99999"], "--nnodes 2 needs --master-addr HOST"),
        (["--nnodes=2", "--master-addr=a:0"], "--nnodes 2 needs --master-addr HOST"),
    ],
)
def test_flags_that_do_not_go_together_say_so(
    flags: list[str], words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAIRLEAD_NODES_SECRET", "short")
    with pytest.raises(SystemExit):
        WorkerConfig.from_command_line(["--model=hf://a/b", "--tensor-parallel-size=2", *flags])
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("leader", "address"),
    [
        ("a.b", ("a.b", 8001)),
        ("a.b:7", ("a.b", 7)),
        ("10.0.0.7:9", ("10.0.0.7", 9)),
        ("[fd00::7]:9", ("fd00::7", 9)),
        ("[::1]", ("::1", 8001)),
    ],
)
def test_the_leaders_address(leader: str, address: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAIRLEAD_NODES_SECRET", SECRET)
    flags = ["--model=hf://a/b", "--tensor-parallel-size=2", "--nnodes=2", f"--master-addr={leader}"]
    config = WorkerConfig.from_command_line(flags)
    assert config.leader_address == address
    assert SECRET not in config.describe()
