"""A model of a CUDA device: streams, events, torch's allocator with its pools, and stream capture.

Work is done when it is launched, on the CPU; vector clocks find what another speed of the streams would change. An ordering fault does
not raise, as it does not on a device: it is added to `Machine.faults`. What CUDA or torch refuses raises RuntimeError.

The allocator may give any freed block to any later request on the same stream and pool. torch releases a block when its last tensor
dies, while the device may still use it: right on one stream, and a fault if another stream used it (`Tensor.record_stream`).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count

import torch
from tests.worker.cuda.clocks import HOST, Access, Clock, History, join


@dataclass(eq=False)
class Pool:
    """A private pool of graphs."""

    number: int
    history: History = field(default_factory=History)
    """Of the memory that graphs reuse for their intermediate results: every replay writes it."""
    uses: int = 0
    """Captures that have not released it."""
    strays: "list[Block]" = field(default_factory=list)
    """Blocks that were taken from the pool outside a capture and are in use."""


@dataclass(eq=False)
class Block:
    """Memory behind one storage."""

    kind: str
    """device, pinned (by torch's cache), or registered (by cudaHostRegister)."""
    size: int
    stream: int = 0
    """The stream for which it was allocated."""
    pool: Pool | None = None
    history: History = field(default_factory=History)
    recorded: set[int] = field(default_factory=set)
    """Streams named by `record_stream`."""
    is_freed: bool = False
    captured: "Capture | None" = None
    """The capture that allocated it."""


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes of a block."""

    block: Block
    begin: int
    end: int


@dataclass(eq=False)
class StreamState:
    number: int
    clock: Clock = field(default_factory=dict)
    """What its next operation is ordered after."""
    capture: "Capture | None" = None


@dataclass(frozen=True, slots=True)
class Node:
    """One recorded operation."""

    what: str
    reads: Sequence[Span]
    writes: Sequence[Span]
    run: Callable[[], None]


@dataclass(eq=False)
class Capture:
    """A stream capture, and the graph that it yields."""

    pool: Pool
    origin: StreamState
    mode: str = "global"
    """Whose calls of CUDA may invalidate it: those of all threads ("global"), or of its own ("thread_local")."""
    nodes: list[Node] = field(default_factory=list)
    invalid: str = ""
    """The error that invalidated it."""
    saved: dict[Block, Callable[[], None]] = field(default_factory=dict)
    """Restores memory that its operations would change: a capture runs nothing."""
    made: list[tuple[Block, Callable[[], None]]] = field(default_factory=list)
    """Its own memory, each with a function that fills it with garbage."""
    joined: dict[int, StreamState] = field(default_factory=dict)


@dataclass
class Failure:
    """An operation that fails."""

    at: int
    invalidates: bool
    """Whether it breaks the capture, as an illegal call does, or is an ordinary error of the host."""
    out_of_memory: bool = False


class Machine:
    """One device and its host."""

    def __init__(self, is_old: bool = False) -> None:
        """`is_old`: as torch before pytorch#180395. A failed `capture_end` leaves its pool recording, and `torch.cuda.graph` its stream
        current.
        """
        self.is_old = is_old
        self.faults: list[str] = []
        self.host: Clock = {}
        self.default = StreamState(1)
        self.streams = [self.default]
        self.current = self.default
        self.captures: list[Capture] = []
        """Under way; CUDA allows several, torch one."""
        self.recording: list[Pool] = []
        """Pools to which the allocator directs captures (`captures_underway`)."""
        self.released: dict[int, list[Block]] = {}
        """Freed blocks by stream, until a later allocation was checked against them."""
        self.pools: list[Pool] = []
        self.hinted: Pool | None = None
        """Pool of eager allocations (`_cuda_beginAllocateCurrentStreamToPool`)."""
        self.operations: list[str] = []
        """Names of the operations since `count_operations`."""
        self.waits: list[str] = []
        """Operations by which the host waited for the device."""
        self.replays = 0
        self._failure: Failure | None = None
        self._counts = False
        self._times = count(1)

    # Operations in general

    @contextmanager
    def count_operations(self, failure: Failure | None = None) -> Iterator[list[str]]:
        """Count operations in this context, and fail one of them."""
        self.operations, self._failure, self._counts = [], failure, True
        try:
            yield self.operations
        finally:
            self._failure, self._counts = None, False

    def begin(self, what: str) -> None:
        """Note that an operation begins; it fails here if it has to."""
        if not self._counts:
            return
        self.operations.append(what)
        failure = self._failure
        if failure is None or len(self.operations) - 1 != failure.at:
            return
        if failure.invalidates:
            for capture in self.captures:
                capture.invalid = capture.invalid or "planted"
        if failure.out_of_memory:
            raise torch.OutOfMemoryError("CUDA out of memory (planted)")
        raise RuntimeError(f"CUDA error: planted at operation {failure.at}, {what}")

    def begin_work(self, what: str) -> None:
        """Note that a launch on the current stream begins; it fails here if it has to."""
        self.begin(what)
        capture = self.current.capture
        if capture is not None and capture.invalid:
            raise RuntimeError(f"CUDA error: operation failed due to a previous error during capture: {capture.invalid}")

    def refuse(self, what: str) -> None:
        """Raise if a capture is under way: `what` is not permitted then, and invalidates it."""
        if self.captures:
            for capture in self.captures:
                capture.invalid = capture.invalid or what
            raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing: {what}")

    def use_from_another_thread(self, what: str) -> None:
        """Note a call of another thread that a capture does not permit. That thread's own error does not matter here."""
        for capture in self.captures:
            if capture.mode == "global":
                capture.invalid = capture.invalid or f"{what}, on another thread"

    def find(self, what: str, unordered: list[Access]) -> None:
        for old in unordered:
            self.faults.append(f"{what} is not ordered after {old.what} of {_name(old.actor)}")

    # Work

    def launch(self, what: str, reads: Sequence[Span], writes: Sequence[Span], run: Callable[[], None]) -> None:
        """Run an operation on the current stream, or record it, after `begin_work`. `run` must be repeatable."""
        stream = self.current
        for span in (*reads, *writes):
            if span.block.is_freed:
                self.faults.append(f"{what} uses memory that was freed")
        if stream.capture is not None:
            self._record(stream.capture, Node(what, reads, writes, run))
            return
        run()
        self._access(*self._tick(stream), what, reads, writes)

    def touch(self, what: str, reads: Sequence[Span], writes: Sequence[Span]) -> None:
        """Note that the host reads and writes host memory."""
        self.host = self.host | {HOST: (time := next(self._times))}
        self._access(HOST, time, self.host, what, reads, writes)

    def _tick(self, stream: StreamState) -> tuple[int, int, Clock]:
        """Count an operation of `stream`. Return the stream's number, the time, and the clock that the operation knows."""
        stream.clock = join(stream.clock, self.host) | {stream.number: (time := next(self._times))}
        return stream.number, time, stream.clock

    def _access(self, actor: int, time: int, clock: Clock, what: str, reads: Sequence[Span], writes: Sequence[Span]) -> None:
        for span in reads:
            self.find(what, span.block.history.read(Access(actor, time, span.begin, span.end, what), clock))
        for span in writes:
            self.find(what, span.block.history.write(Access(actor, time, span.begin, span.end, what), clock))

    def wait(self, clock: Clock, what: str) -> None:
        """Let the host wait until `clock`."""
        self.begin(what)
        self.refuse(what)
        self.waits.append(what)
        self.host = join(self.host, clock)

    def synchronize(self, what: str = "synchronize") -> None:
        """Let the host wait for all streams."""
        self.wait(join(*(stream.clock for stream in self.streams)), what)

    # Memory

    def allocate(self, size: int) -> Block:
        """Return memory for the current stream, from the pool of its capture."""
        stream = self.current
        if stream.capture is not None:
            return Block("device", size, stream.number, stream.capture.pool, captured=stream.capture)
        if self.captures:
            self.refuse("allocation outside the pool of the graph")
        clock = join(stream.clock, self.host)
        for old in self.released.pop(stream.number, []):
            unordered = [access for access in old.history.unfinished(clock) if access.actor not in old.recorded]
            self.find(f"reuse of memory freed on {_name(stream.number)}", unordered)
        block = Block("device", size, stream.number, self.hinted)
        if self.hinted is not None:
            self.hinted.strays.append(block)
        return block

    def free(self, block: Block) -> None:
        """Take the memory back: its last tensor died."""
        block.is_freed = True
        if block.kind == "device" and block.pool is None:
            self.released.setdefault(block.stream, []).append(block)
        elif block.pool is not None and block in block.pool.strays:
            block.pool.strays.remove(block)

    def empty_cache(self) -> None:
        self.begin("empty_cache")
        if self.recording:
            raise RuntimeError("INTERNAL ASSERT FAILED: captures_underway.empty()")

    # Streams and events

    def new_stream(self) -> StreamState:
        self.begin("new stream")
        self.streams.append(StreamState(len(self.streams) + 1))
        return self.streams[-1]

    def join_capture(self, stream: StreamState, capture: Capture | None, what: str) -> None:
        """Let `stream` wait for an event of `capture` (None: of no capture)."""
        if stream.capture is None and capture is not None and capture in self.captures:
            stream.capture = capture
            capture.joined[stream.number] = stream
        elif stream.capture is not None and capture is not stream.capture:
            stream.capture.invalid = stream.capture.invalid or what
            raise RuntimeError(f"CUDA error: dependency created on uncaptured work in another stream: {what}")

    # Capture

    def begin_capture(self, pool: Pool, mode: str = "global") -> Capture:
        self.begin("capture_begin")
        stream = self.current
        if stream is self.default:
            raise RuntimeError("CUDA graphs must be captured on a non-default stream")
        if pool in self.recording:
            raise RuntimeError(f"beginAllocateToPool: already recording to mempool_id {pool.number}")
        self.recording.append(pool)
        pool.uses += 1
        self.begin("cudaStreamBeginCapture")
        stream.capture = Capture(pool, stream, mode)
        self.captures.append(stream.capture)
        return stream.capture

    def end_capture(self, capture: Capture) -> None:
        """End it; raises if it is not a valid graph."""
        stream = self.current
        error = ""
        if stream is not capture.origin:
            error = "capture must end on the same stream it began on"
        try:
            self.begin("capture_end")
        except Exception as planted:
            error = str(planted)
        unjoined = [each for number, each in capture.joined.items() if each.clock.get(number, 0) > stream.clock.get(number, 0)]
        if capture.invalid:
            error = error or f"CUDA error: operation failed due to a previous error during capture: {capture.invalid}"
        elif unjoined:
            error = error or "CUDA error: capture has unjoined work of another stream"
        self.captures.remove(capture)
        for each in (capture.origin, *capture.joined.values()):
            each.capture = None
        for restore in capture.saved.values():
            restore()
        capture.saved.clear()
        if not (error and self.is_old):
            self.end_recording(capture.pool)
        for _, spoil in capture.made:
            spoil()
        capture.made.clear()
        if error:
            capture.nodes.clear()
            raise RuntimeError(error)

    def end_recording(self, pool: Pool) -> None:
        if pool not in self.recording:
            raise RuntimeError(f"endAllocatePool: not currently recording to mempool_id {pool.number}")
        self.recording.remove(pool)

    def release_pool(self, pool: Pool) -> None:
        if pool.uses == 0:
            raise RuntimeError("INTERNAL ASSERT FAILED: a pool is released more often than it was used")
        pool.uses -= 1

    def _record(self, capture: Capture, node: Node) -> None:
        self.current.clock = self.current.clock | {self.current.number: next(self._times)}
        node.run()
        capture.nodes.append(node)

    def replay(self, capture: Capture) -> None:
        """Run a graph on the current stream."""
        self.begin("replay")
        if self.current.capture is not None:
            self.refuse("replay")
        self.replays += 1
        reads, writes, pool = dict[Span, None](), dict[Span, None](), capture.pool
        for node in capture.nodes:
            for spans, kept in ((node.reads, reads), (node.writes, writes)):
                for span in spans:
                    if span.block.pool is not pool:
                        if span.block.is_freed:
                            self.faults.append(f"a replay uses memory that was freed: {node.what}")
                        kept[span] = None
                    elif not span.block.is_freed:
                        kept[span] = None
        if pool.strays:
            self.faults.append(f"a replay overwrites {len(pool.strays)} blocks that eager work took from the pool")
        for node in capture.nodes:
            node.run()
        number, time, clock = self._tick(self.current)
        self._access(number, time, clock, "a replay", list(reads), list(writes))
        self.find("a replay", pool.history.write(Access(number, time, 0, 1, "a replay on the same pool"), clock))


def _name(actor: int) -> str:
    return "the host" if actor == HOST else f"stream {actor}"
