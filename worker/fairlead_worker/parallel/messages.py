"""Messages from rank 0 to the other ranks and nodes, and their replies. Only rank 0 plans and samples: a step travels as its packed
tensors.
"""

from typing import Any

import msgspec

from fairlead_worker.cache.states import RowState


class Join(msgspec.Struct, frozen=True):
    """Settings of a rank, as one line of JSON on its standard input."""

    directory: str
    """Folder of the sockets, and of the rendezvous file if all ranks are on one node."""
    rank: int
    size: int
    config: dict[str, Any]
    local: int
    """Index of the rank on its node: its GPU."""
    meeting: str = ""
    """HOST:PORT of the rendezvous store of several nodes; empty: the file."""


class LoadModel(msgspec.Struct, tag=True, frozen=True):
    """Load this rank's part of the model, whose files are in `folder`."""

    folder: str


class Run(msgspec.Struct, tag=True, frozen=True):
    """Run a forward pass: `kernels.base.PackedStep`, its tensors as bytes of little-endian int64 (page tables: int32)."""

    tokens: bytes
    positions: bytes
    slots: bytes
    starts: list[int]
    counts: list[int]
    page_indptr: bytes
    page_indices: bytes
    sampling: bytes
    others: list[tuple[bytes, bytes]] = []
    """Slots and page tables of each group of layers after the first one."""
    places: bytes | None = None
    """Token indices whose hidden states are recorded too, int64; None: none."""
    adapters: list[int] = []
    """Number of each row's adapter, 0 for none; empty: no row has one."""
    graph: tuple[int, bool] | None = None
    """The CUDA graph that rank 0 replays (`execution.cuda_graphs.decodes.Choice`); None: it runs the forward pass."""
    states: list[RowState | None] = []
    """Where each row's recurrent states are."""
    shares: bool = False
    """Whether some tokens are unread, and rank 0 gives the others its own, from device to device."""


class ReadLogits(msgspec.Struct, tag=True, frozen=True):
    """Compute the logits of some of the last pass's places: each rank's head has a part of the vocabulary."""

    start: int
    stop: int


class DropGraphs(msgspec.Struct, tag=True, frozen=True):
    """Free the CUDA graphs: rank 0 replays none of them from now on."""


class CopyPages(msgspec.Struct, tag=True, frozen=True):
    """Copy between the device and the host tier, as in a plan."""

    saves: list[tuple[int, int]]
    loads: list[tuple[int, int]]


class AdapterFetched(msgspec.Struct, tag=True, frozen=True):
    """The files of an adapter are in `folder`. Sent on each node separately, before `AddAdapter`."""

    number: int
    folder: str


class AddAdapter(msgspec.Struct, tag=True, frozen=True):
    """Load and try this rank's part of an adapter, and keep it if all ranks can."""

    number: int
    name: str
    uri: str


class RemoveAdapter(msgspec.Struct, tag=True, frozen=True):
    """Remove an adapter that no step uses any more."""

    number: int


class End(msgspec.Struct, tag=True, frozen=True):
    """End the rank. No message follows."""


class RankFailed(msgspec.Struct, frozen=True):
    """The reason why a rank ends."""

    rank: int
    reason: str


class Hello(msgspec.Struct, tag=True, frozen=True):
    """A node asks to join. Repeated until it is answered."""

    node: int
    name: str
    """Name of its pod, for people."""
    version: str
    flags: dict[str, Any]
    """Settings that must be equal on all nodes."""


class Progress(msgspec.Struct, tag=True, frozen=True):
    """Load progress of a node."""

    node: int
    phase: str
    percent: int
    detail: str
    done: int
    total: int
    beat: int
    """Increases while its processes read or compute."""


class FetchDone(msgspec.Struct, tag=True, frozen=True):
    """Result of a `FetchAdapter`, which is for a node and not its ranks: they know the folder."""

    node: int
    number: int
    error: str = ""
    """The reason of a failure; empty: success."""


class NodeFailed(msgspec.Struct, tag=True, frozen=True):
    """The reason why a node ends, which ends all nodes."""

    node: int
    reason: str


class Welcome(msgspec.Struct, tag=True, frozen=True):
    """The node has joined; ports of the leader."""

    steps: int
    """Port of the messages for this node's ranks."""
    meeting: int
    """Port of the rendezvous store of all ranks."""


class NodeRejected(msgspec.Struct, tag=True, frozen=True):
    """The node cannot join."""

    reason: str


ToRank = LoadModel | Run | ReadLogits | DropGraphs | CopyPages | AdapterFetched | AddAdapter | RemoveAdapter | End
FromNode = Hello | Progress | FetchDone | NodeFailed
ToNode = Welcome | NodeRejected
