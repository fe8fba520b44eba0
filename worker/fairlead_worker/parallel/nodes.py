"""Rank 0's control of the other nodes of a model: it admits them, sends them each step, and receives load progress and failures.

torchrun's rendezvous would be less code, but it admits every client that reaches its port: such a client reads the group's id from the
store and takes a rank. Here a node without the shared secret is refused.
It also waits in silence: our leader's `/ready` names the missing nodes, and a refused node says which flag or release differs.
"""

import functools
import logging
import math
import socket
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec
import zmq

from fairlead_worker.config import WorkerConfig
from fairlead_worker.config.options import setting_name
from fairlead_worker.engine.loop import EngineEnd
from fairlead_worker.ipc.messages import AdapterChanged, FetchAdapter, Loading
from fairlead_worker.parallel.keys import authenticator, secure_server
from fairlead_worker.parallel.links import Socket, bind, make_socket, monitor, read_events, send_unless_ended
from fairlead_worker.parallel.messages import FetchDone, FromNode, Hello, NodeFailed, NodeRejected, Progress, ToNode, Welcome
from fairlead_worker.platform.version import release

if TYPE_CHECKING:
    from fairlead_worker.sharding.rendezvous import Store

logger = logging.getLogger(__name__)

OWN_SETTINGS = {
    *("node_rank", "master_addr", "nodes_secret", "host", "port", "admin_port", "pod_name", "advertise", "canary", "model_cache"),
    *("termination_log", "trace_schedule", "threads", "redis_url", "redis_credentials"),
    *("index_namespace", "peers"),
}
"""Configuration fields that may differ between nodes; all others must be equal."""
REPORT_SECONDS = 1.0
"""Seconds between two reports of missing nodes."""
CONNECT_SECONDS = 30.0
"""Seconds in which an admitted node must connect."""
REASON_SECONDS = 0.5
"""Seconds in which a node's reason may arrive after its connection ended."""


def shared_settings(config: WorkerConfig) -> dict[str, object]:
    """Return the configuration that must be equal on all nodes."""
    return {name: value for name, value in config.model_dump().items() if name not in OWN_SETTINGS}


class Nodes:
    """The nodes from 1 on. One thread uses `wait`, `send`, `fetch` and `store`; a second thread handles incoming messages."""

    def __init__(self, config: WorkerConfig, outbox: EngineEnd, on_loss: Callable[[str], None]) -> None:
        """Listen for nodes. `on_loss(reason)` is called on the second thread for the first node that fails. Raises OSError if a port is
        taken.
        """
        self._config, self._outbox, self._on_loss = config, outbox, on_loss
        self._shared = shared_settings(config)
        host, port = config.leader_address
        self._host = host if _is_address(host) else "*"
        self.report = False
        """Rank 0 has loaded its part: from now on the other nodes' progress is reported."""
        self._joined: dict[int, str] = {}
        """node -> name of its pod, for nodes that have joined."""
        self._refused = ""
        self._loads: dict[int, Progress] = {}
        self._fetching: dict[int, set[int]] = {}
        """adapter number -> nodes that have not downloaded its files yet."""
        self._welcomed: dict[int, float] = {}
        self._connected: set[int] = set()
        self._ended: set[int] = set()
        self._changed = threading.Condition()
        self._beat = 0
        self._context = zmq.Context()
        self._authenticator = authenticator(self._context, config.nodes_secret)
        greetings = self._socket(zmq.ROUTER)
        self._steps = {node: self._socket(zmq.PUSH) for node in range(1, config.nnodes)}
        try:
            bind(greetings, self._host, port)
            self._ports = {node: bind(steps, self._host) for node, steps in self._steps.items()}
            self._listener = _listener("" if self._host == "*" else host)
        except OSError:
            self._authenticator.stop()
            raise
        self.meeting = str(self._listener.getsockname()[1])
        monitors = {monitor(steps): node for node, steps in self._steps.items()}
        threading.Thread(target=self._serve, args=(greetings, monitors), name="nodes", daemon=True).start()

    def wait(self) -> None:
        """Wait until all nodes have joined."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._joined) == len(self._steps))
        logger.info("all %d nodes are in: %s", self._config.nnodes, ", ".join(self._joined[node] for node in sorted(self._joined)))

    def store(self, size: int) -> "Store":
        """Return the rendezvous store of all ranks."""
        from fairlead_worker.sharding.rendezvous import host_store

        return host_store(self._listener, size)

    def send(self, data: bytes) -> None:
        """Send to all nodes, which forward it to their ranks. Skip nodes that have not joined or have ended."""
        self.report = False
        self._send_to_all([data])

    def fetch(self, wanted: FetchAdapter) -> None:
        """Let all nodes download an adapter's files. Sends an `AdapterChanged` when all are done, or when one fails."""
        self._fetching[wanted.number] = set(self._steps)
        self._send_to_all([b"", msgspec.msgpack.encode(wanted)])  # two parts: for the node itself

    def wait_ended(self, seconds: float) -> None:
        """Wait until all joined nodes have ended, at most `seconds`."""
        with self._changed:
            self._changed.wait_for(lambda: set(self._joined) <= self._ended, seconds)

    def _send_to_all(self, parts: list[bytes]) -> None:
        for node, steps in self._steps.items():
            send_unless_ended(steps, parts, functools.partial(self._is_absent, node))

    def _is_absent(self, node: int) -> bool:
        """Return whether a node has not joined or has ended. A node that has joined connects soon, or counts as ended."""
        return node not in self._joined or node in self._ended

    def _socket(self, kind: int) -> Socket:
        socket = make_socket(self._context, kind)
        secure_server(socket, self._config.nodes_secret)
        return socket

    def _serve(self, greetings: Socket, monitors: dict[Socket, int]) -> None:
        poller = zmq.Poller()
        for each in (greetings, *monitors):
            poller.register(each, zmq.POLLIN)
        last_report = 0.0
        while True:
            ready = dict(poller.poll(int(REPORT_SECONDS * 1000)))
            if greetings in ready:
                self._receive(greetings)
            for watch, node in monitors.items():
                events = read_events(watch) if watch in ready else []
                if zmq.EVENT_HANDSHAKE_SUCCEEDED in events:
                    self._connected.add(node)
                if (zmq.EVENT_DISCONNECTED in events and node in self._joined) or (
                    node not in self._connected and time.monotonic() > self._welcomed.get(node, math.inf) + CONNECT_SECONDS
                ):
                    self._end(greetings, node)
            if time.monotonic() >= last_report + REPORT_SECONDS:
                last_report = time.monotonic()
                self._report_progress()

    def _receive(self, greetings: Socket) -> None:
        identity, data = greetings.recv_multipart()
        try:
            message = msgspec.msgpack.decode(data, type=FromNode)
        except msgspec.DecodeError as error:
            self._refused = f"a peer at --master-addr sent no message of this version: {error}"
            return
        match message:
            case Hello():
                answer = self._answer(message)
                greetings.send_multipart([identity, msgspec.msgpack.encode(answer)])
            case Progress(node=node):
                self._loads[node] = message
            case FetchDone():
                self._count(message)
            case NodeFailed(node=node, reason=reason):
                self._on_loss(f"{self._describe(node)}: {reason}")

    def _count(self, done: FetchDone) -> None:
        """Count a node that has an adapter's files or failed to download them."""
        missing = self._fetching.get(done.number)
        if missing is None:  # an adapter of --lora-modules, whose download is not awaited here; or another node failed before
            return
        missing.discard(done.node)
        if done.error or not missing:
            del self._fetching[done.number]
            self._outbox.send(AdapterChanged(done.number, error=done.error and f"{self._describe(done.node)}: {done.error}"))

    def _answer(self, hello: Hello) -> ToNode:
        joined, ours = self._joined.get(hello.node), release()
        different = [name for name, value in self._shared.items() if hello.flags.get(name) != msgspec.to_builtins(value)]
        reason = ""
        if hello.version != ours:
            reason = f"it runs fairlead {hello.version}, and the leader {ours}: give all nodes one image"
        elif "nnodes" in different or not 0 < hello.node < self._config.nnodes:
            reason = f"it is node {hello.node} of {hello.flags.get('nnodes')}, and the leader's --nnodes is {self._config.nnodes}"
        elif different:
            names = {name: setting_name(name, WorkerConfig.model_fields[name]) for name in different[:3]}
            some = [f"{shown} {hello.flags.get(name)!r}, {self._shared[name]!r} at the leader" for name, shown in names.items()]
            reason = f"its flags are not the leader's: {', '.join(some)}"
        elif joined is not None and joined != hello.name:
            reason = f"node {hello.node} is in already: {joined}"
        if reason:
            refusal = f"{hello.name} was refused: {reason}"
            if refusal != self._refused:
                logger.warning("%s", refusal)
            self._refused = refusal
            return NodeRejected(reason)
        self._welcomed.setdefault(hello.node, time.monotonic())
        with self._changed:
            self._joined[hello.node] = hello.name
            self._changed.notify_all()
        return Welcome(self._ports[hello.node], int(self.meeting))

    def _end(self, greetings: Socket, node: int) -> None:
        """Handle the broken connection of a node. Its own reason may still arrive."""
        with self._changed:
            self._ended.add(node)
            self._changed.notify_all()
        deadline = time.monotonic() + REASON_SECONDS
        while (left := deadline - time.monotonic()) > 0:
            if greetings.poll(int(left * 1000)):
                self._receive(greetings)
        self._on_loss(f"{self._describe(node)} is gone, or the network to it: see its log")

    def _describe(self, node: int) -> str:
        return f"node {node} of {self._config.nnodes} ({self._joined.get(node, 'not in yet')})"

    def _report_progress(self) -> None:
        """Report the progress of missing nodes and of other nodes' loads as this worker's own progress."""
        missing = sorted(self._steps.keys() - self._joined.keys())
        self._beat += 1
        if missing:
            some = ", ".join(map(str, missing[:4])) + (" …" if len(missing) > 4 else "")
            words = f"waits for node {some} of {self._config.nnodes}" + (f"; {self._refused}" if self._refused else "")
            self._outbox.send(Loading("nodes", 100 * len(self._joined) // len(self._steps), words, beat=self._beat))
        elif self.report and self._loads:
            load = min(self._loads.values(), key=lambda each: (each.phase == "weights", each.percent, each.node))
            words = f"{load.detail} on {self._describe(load.node)}".strip()
            beats = sum(each.beat for each in self._loads.values())
            self._outbox.send(Loading(load.phase, load.percent, words, load.done, load.total, beats))


def _is_address(host: str) -> bool:
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            socket.inet_pton(family, host)
            return True
        except OSError:
            continue
    return False


def _listener(host: str) -> socket.socket:
    """Listen at `host`; empty: at every address."""
    if not host and socket.has_dualstack_ipv6():
        return socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
