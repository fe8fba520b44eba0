"""A rank other than 0: loads its part of the model, then computes what rank 0 computes. Started by `processes.py`; ends with its node.

`python -m fairlead_worker.parallel.follower` reads one line of JSON (`Join`) from standard input and keeps reading. End of input
means that rank 0, or its substitute on this node, has ended, and ends this process.
"""

import logging
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import zmq

from fairlead_common.telemetry.logs import configure_logging
from fairlead_worker.config import WorkerConfig
from fairlead_worker.parallel.messages import (
    AdapterFetched,
    AddAdapter,
    CopyPages,
    DropGraphs,
    End,
    Join,
    LoadModel,
    RankFailed,
    ReadLogits,
    RemoveAdapter,
    Run,
    ToRank,
)
from fairlead_worker.platform.processes import end_with_parent, open_parent_pipe

if TYPE_CHECKING:
    from fairlead_worker.execution.forward import HiddenStates
    from fairlead_worker.execution.runner import ModelRunner
    from fairlead_worker.lora.adapters import AdapterSet
    from fairlead_worker.sharding.group import Group

logger = logging.getLogger(__name__)

LINGER_MS = 2000


class RankChannel:
    """This rank's end of the sockets of `Ranks`."""

    def __init__(self, join: Join) -> None:
        self._rank = join.rank
        self._context = zmq.Context()
        self._in = self._context.socket(zmq.PULL)
        self._in.set_hwm(0)
        self._in.connect(f"ipc://{Path(join.directory) / str(join.rank)}")
        self._out = self._context.socket(zmq.PUSH)
        self._out.setsockopt(zmq.LINGER, LINGER_MS)
        self._out.connect(f"ipc://{Path(join.directory) / 'from'}")
        self._decoder: msgspec.msgpack.Decoder[ToRank] = msgspec.msgpack.Decoder(ToRank)

    def receive(self) -> ToRank:
        """Wait for the next message and return it."""
        return self._decoder.decode(self._in.recv())

    def send_failure(self, reason: str) -> None:
        """Send the failure reason, the only message of a rank, and close."""
        self._out.send(msgspec.msgpack.encode(RankFailed(self._rank, reason)))
        self._in.close(0)
        self._out.close()
        self._context.term()


def main() -> int:
    parent_pipe = open_parent_pipe()
    join = msgspec.json.decode(parent_pipe.readline(), type=Join)
    config, name = WorkerConfig.model_validate(join.config), f"rank {join.rank}"
    configure_logging(config.log_level, config.log_format, sys.stderr, f"%(asctime)s %(levelname)s {name} %(name)s: %(message)s", name)
    end_with_parent(parent_pipe)
    channel = RankChannel(join)
    try:
        follow(join, channel)
    except Exception as error:
        from fairlead_worker.build import describe_error

        logger.exception("rank %d ends", join.rank)
        channel.send_failure(describe_error(error))
        return 1
    return 0


def follow(join: Join, channel: RankChannel) -> None:
    """Load this rank's part and serve until `End`. Any failure ends all ranks."""
    from fairlead_worker.build import build_adapters, build_runner, load
    from fairlead_worker.model.lean import import_transformers

    import_transformers()
    from fairlead_worker.errors import AdapterError
    from fairlead_worker.sharding.group import Group, check_devices
    from fairlead_worker.sharding.rendezvous import file_store, join_store

    config = WorkerConfig.model_validate(join.config)
    check_devices(config)
    meeting = join_store(join.meeting, join.size) if join.meeting else file_store(Path(join.directory))
    group = Group.join(meeting, join.rank, join.size, join.local)
    message = channel.receive()
    if not isinstance(message, LoadModel):
        return
    folder = Path(message.folder)
    loaded = load(config, group=group, locate=lambda uri, progress, cache: folder)
    if config.nnodes > 1:
        group.check_same(config.model, loaded.digest)
    adapters = build_adapters(config, loaded, group)
    for number, (name, uri) in enumerate(config.loras.items(), 1):
        fetched = channel.receive()
        if not isinstance(fetched, AdapterFetched):
            return
        assert adapters is not None and fetched.number == number, "the configuration counts them"
        try:
            adapters.load(number, name, uri, Path(fetched.folder))
        except AdapterError:  # no rank has it, and rank 0 reports why
            while not isinstance(channel.receive(), End):
                pass
            return
    runner = build_runner(config, loaded, group, adapters=adapters)
    logger.info("rank %d of %d is ready on %s", join.rank, join.size, loaded.device)
    serve(channel, runner, group, adapters)


def serve(channel: RankChannel, runner: "ModelRunner", group: "Group", adapters: "AdapterSet | None" = None) -> None:
    """Compute what rank 0 computes, until `End`."""
    from fairlead_worker.errors import AdapterError
    from fairlead_worker.parallel.lead import to_step

    seen: HiddenStates | None = None
    folders: dict[int, Path] = {}
    while True:
        match channel.receive():
            case Run() as run:
                step, graph, places = to_step(run, runner.loaded.device)
                if run.shares:
                    group.share(step.tokens)
                seen = runner.follow(step, graph, places)
            case ReadLogits(start=start, stop=stop):
                assert seen is not None, "rank 0 looks at places of the last pass"
                seen.logits(slice(start, stop))
            case DropGraphs():
                runner.graphs = None
            case CopyPages(saves=saves, loads=loads):
                assert runner.host is not None, "rank 0 has a host tier of the same configuration"
                runner.host.copy(saves, loads)
            case AdapterFetched(number=number, folder=folder):
                folders[number] = Path(folder)
            case AddAdapter(number=number, name=name, uri=uri):
                assert adapters is not None, "rank 0 has adapters of the same configuration"
                with suppress(AdapterError):  # no rank has it then, and rank 0 reports why
                    adapters.load(number, name, uri, folders.pop(number))
            case RemoveAdapter(number=number):
                assert adapters is not None, "rank 0 has adapters of the same configuration"
                adapters.unload(number)
            case LoadModel():
                raise AssertionError("a rank loads once")
            case End():
                return


if __name__ == "__main__":
    status = main()
    logging.shutdown()
    os._exit(status)
