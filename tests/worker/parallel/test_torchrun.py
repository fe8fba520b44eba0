"""Why nodes meet by our own protocol and not by torchrun: torchrun's rendezvous admits every client that reaches its port.

`test_nodes.py` shows the same with our protocol: a node without the secret is refused, and both sides say why.
"""

import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from tests.servers.redis_server import free_port
from tests.worker.api.process import until
from torch.distributed import DistNetworkError, TCPStore  # type: ignore[attr-defined]  # exported, but not in its stubs

SCRIPT = """
import torch.distributed as dist
dist.init_process_group("gloo")
print("rank", dist.get_rank(), "of", dist.get_world_size(), flush=True)
dist.barrier()
dist.destroy_process_group()
"""
PREFIX = "torch.rendezvous."


class Torchrun:
    """Starts torchrun for one node of two, and ends what is left."""

    def __init__(self, folder: Path) -> None:
        self._folder, self.port = folder, free_port()
        (folder / "script.py").write_text(SCRIPT)
        self._started: list[subprocess.Popen[bytes]] = []

    def node(self, group: str) -> Path:
        """Start a node that knows the address and the group's id. Return its log."""
        log = self._folder / f"{len(self._started)}.log"
        flags = ["--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d"]
        flags += ["--rdzv-endpoint", f"127.0.0.1:{self.port}", "--rdzv-id", group, "--local-addr", "127.0.0.1"]
        command = [sys.executable, "-m", "torch.distributed.run", *flags, str(self._folder / "script.py")]
        with log.open("wb") as output:
            self._started.append(subprocess.Popen(command, stdout=output, stderr=output))
        return log

    def store(self) -> TCPStore:
        """Connect to the rendezvous as a client that was told nothing but its address."""
        give_up = time.monotonic() + 60
        while True:
            try:
                return TCPStore("127.0.0.1", self.port, is_master=False, timeout=timedelta(seconds=5))
            except DistNetworkError:
                if time.monotonic() > give_up:
                    raise
                time.sleep(0.2)

    def close(self) -> None:
        for process in self._started:
            process.terminate()
        for process in self._started:
            process.wait(60)


@pytest.fixture
def torchrun(tmp_path: Path) -> Iterator[Torchrun]:
    made = Torchrun(tmp_path)
    yield made
    made.close()


def test_a_stranger_reads_the_id_of_torchruns_group_and_takes_a_rank(torchrun: Torchrun) -> None:
    first = torchrun.node("an-unguessable-id-4c1f")
    store = torchrun.store()
    until(lambda: store.num_keys() > 0, "the first node waits")
    [key] = [key for key in store.list_keys() if key.startswith(PREFIX)]
    second = torchrun.node(key.removeprefix(PREFIX))
    until(lambda: "of 2" in first.read_text() and "of 2" in second.read_text(), "the stranger is one of the two ranks")
