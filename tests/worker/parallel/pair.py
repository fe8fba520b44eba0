"""Two ranks for tests: this process is rank 0, and the second one, started once, loads model after model."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, cast

import msgspec
import torch
import torch.distributed as dist
import zmq
from tests.worker.exactness.harness import Engine

from fairlead_worker.execution.host import PlainHostStore
from fairlead_worker.execution.runner import ModelRunner, make_runner
from fairlead_worker.lora.adapters import AdapterSet
from fairlead_worker.model.loader import LoadedModel, load_model
from fairlead_worker.parallel.follower import RankChannel, serve
from fairlead_worker.parallel.lead import LedAdapters, LedForward, LedHost
from fairlead_worker.parallel.messages import AdapterFetched, End, Join, LoadModel, ToRank
from fairlead_worker.parallel.ranks import Ranks
from fairlead_worker.scheduler.config import SchedulerConfig
from fairlead_worker.sharding.group import Group
from fairlead_worker.sharding.rendezvous import file_store

MAX_LORAS, MAX_LORA_RANK = 3, 16


class Pair:
    """Rank 0's side, with the part of `Ranks` that leading needs."""

    adapters: LedAdapters
    """Adapters of the latest engine."""

    def __init__(self, directory: Path) -> None:
        self._socket = zmq.Context.instance().socket(zmq.PUSH)
        self._socket.sndtimeo = 60_000  # a dead rank reads nothing: fail instead of hanging
        self._socket.bind(f"ipc://{directory / '1'}")
        join = Join(str(directory), 1, 2, {}, 1)
        self.process = subprocess.Popen([sys.executable, "-m", "tests.worker.parallel.pair"], stdin=subprocess.PIPE, bufsize=0)
        assert self.process.stdin is not None
        self.process.stdin.write(msgspec.json.encode(join) + b"\n")
        self.group = Group.join(file_store(directory), 0, 2)
        self.elsewhere: dict[int, Path] = {}
        """adapter number -> folder in which the second rank finds its files, if it differs"""

    def send(self, message: ToRank) -> None:
        self._socket.send(msgspec.msgpack.encode(message))

    def fetched(self, number: int, folder: Path) -> None:
        self.send(AdapterFetched(number, str(self.elsewhere.get(number, folder))))

    @staticmethod
    def collective() -> nullcontext[None]:
        return nullcontext()

    @contextmanager
    def engine(
        self, model: Path, pages: int = 512, page_size: int = 16, host_slots: int = 0, quantization: str = "none", **options: Any
    ) -> Iterator[Engine]:
        """Return an engine whose model is split over both ranks, behind the real scheduler."""
        sizes = {"pages": pages, "page_size": page_size, "host_slots": host_slots}
        self.send(LoadModel(json.dumps(sizes | {"model": str(model), "quantization": quantization})))
        loaded = load_model(str(model), group=self.group, quantization=quantization)
        adapters = adapters_of(loaded, self.group)
        engine = Engine(loaded, adapters=adapters, **sizes, **options)
        ranks = cast(Ranks, self)
        self.adapters = LedAdapters(adapters, ranks)
        engine.runner.forward = LedForward(engine.runner.forward, ranks)
        if engine.runner.host is not None:
            engine.runner.host = LedHost(engine.runner.host, ranks)
        try:
            yield engine
        finally:
            self.send(End())

    def profiled(self, model: Path, memory: "Plenty") -> ModelRunner:
        """Return a runner whose pages fit on both ranks beside the largest step."""
        self.send(LoadModel(json.dumps({"model": str(model), "profiled": memory.total})))
        try:
            return profiled(model, self.group, memory)
        finally:
            self.send(End())

    def close(self) -> None:
        self.send(End())
        assert self.process.wait(60) == 0
        self._socket.close()
        dist.destroy_process_group()


class Plenty:
    """Implements `execution.sizing.DeviceMemory` with room for everything."""

    def __init__(self, total: int) -> None:
        self.total = total

    def free(self) -> int:
        return self.total

    def peak_of(self, run: Callable[[], None]) -> int:
        run()
        return 1 << 20


def adapters_of(loaded: LoadedModel, group: Group) -> AdapterSet:
    return AdapterSet(loaded, MAX_LORAS, MAX_LORA_RANK, group=group)


def profiled(model: Path, group: Group, memory: Plenty) -> ModelRunner:
    loaded = load_model(str(model), group=group)
    steps = SchedulerConfig(64, max_num_seqs=4, chunked_prefill_size=16)
    return make_runner(loaded, page_size=16, adapters=adapters_of(loaded, group), steps=steps, memory=memory, agree=group.least)


def main() -> None:
    """The second rank."""
    torch.set_num_threads(1)
    join = msgspec.json.decode(sys.stdin.buffer.readline(), type=Join)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    ear = RankChannel(join)
    group = Group.join(file_store(Path(join.directory)), 1, 2)
    while isinstance(message := ear.receive(), LoadModel):
        wanted = json.loads(message.folder)
        if "profiled" in wanted:
            serve(ear, profiled(wanted["model"], group, Plenty(wanted["profiled"])))
            continue
        loaded = load_model(wanted["model"], group=group, quantization=wanted["quantization"])
        adapters = adapters_of(loaded, group)
        runner = make_runner(loaded, page_size=wanted["page_size"], kv_pages=wanted["pages"], adapters=adapters)
        if wanted["host_slots"]:
            runner.host = PlainHostStore(runner.backend, wanted["host_slots"])
        serve(ear, runner, adapters)


def _end_with_parent() -> None:
    while sys.stdin.buffer.raw.read(1):
        pass
    os._exit(1)


if __name__ == "__main__":
    main()
    os._exit(0)
