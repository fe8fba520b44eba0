"""What rank 0 tells the other ranks, and their last words. Rank 0 alone plans and samples: a step travels as its packed tensors."""

from typing import Any

import msgspec


class Join(msgspec.Struct, frozen=True):
    """What a rank is started with, as one line of JSON on its standard input."""

    directory: str
    """Of the sockets, and of the file through which the ranks meet where all are on one node."""
    rank: int
    size: int
    config: dict[str, Any]
    local: int
    """Which of its node's ranks: its GPU."""
    meeting: str = ""
    """HOST:PORT of the store through which the ranks of several nodes meet; empty: the file."""


class LoadModel(msgspec.Struct, tag="load", frozen=True):
    """Read your part of the model: its files are in `folder`."""

    folder: str


class Run(msgspec.Struct, tag="run", frozen=True):
    """A forward pass: `kernels.base.PackedStep`, its tensors as bytes of little-endian int64 (page tables: int32)."""

    tokens: bytes
    positions: bytes
    slots: bytes
    starts: list[int]
    counts: list[int]
    page_indptr: bytes
    page_indices: bytes
    sampling: bytes
    places: bytes | None = None
    """Tokens of the step that are looked at too, int64; None: none."""
    adapters: list[int] = []
    """Number of each row's adapter, 0 being none; empty: no row has one."""


class ReadLogits(msgspec.Struct, tag="look", frozen=True):
    """The logits of some of the last pass's places: each rank's head has a part of the vocabulary."""

    start: int
    stop: int


class CopyPages(msgspec.Struct, tag="copy", frozen=True):
    """Copies between the device and the host tier, as a plan has them."""

    saves: list[tuple[int, int]]
    loads: list[tuple[int, int]]


class AdapterFetched(msgspec.Struct, tag="fetched", frozen=True):
    """The files of an adapter are in `folder`: said on each node by itself, and before `AddAdapter`."""

    number: int
    folder: str


class AddAdapter(msgspec.Struct, tag="adopt", frozen=True):
    """Read your part of an adapter, try it, and keep it if all ranks can."""

    number: int
    name: str
    uri: str


class RemoveAdapter(msgspec.Struct, tag="drop", frozen=True):
    """Forget an adapter: no step has it any more."""

    number: int


class End(msgspec.Struct, tag="end", frozen=True):
    """Nothing more will come."""


class RankFailed(msgspec.Struct, frozen=True):
    """Why a rank ends."""

    rank: int
    reason: str


class Hello(msgspec.Struct, tag="hello", frozen=True):
    """A node that wants to come in; said again until it is answered."""

    node: int
    name: str
    """Of its pod, for people."""
    version: str
    flags: dict[str, Any]
    """What has to be the same on all nodes."""


class Progress(msgspec.Struct, tag="progress", frozen=True):
    """How far the load of a node is."""

    node: int
    phase: str
    percent: int
    detail: str
    done: int
    total: int
    beat: int
    """Moves on while its processes read or compute."""


class FetchFiles(msgspec.Struct, tag="fetch", frozen=True):
    """For a node, not for its ranks: fetch an adapter's files, beside the steps, and tell the ranks where they are (`AdapterFetched`)."""

    number: int
    name: str
    uri: str


class FetchDone(msgspec.Struct, tag="here", frozen=True):
    """What came of a `FetchFiles`: the ranks of this node know of the files."""

    node: int
    number: int
    error: str = ""
    """Why they are not there."""


class NodeFailed(msgspec.Struct, tag="lost", frozen=True):
    """Why a node ends, and so all of them."""

    node: int
    reason: str


class Welcome(msgspec.Struct, tag="welcome", frozen=True):
    """Come in: ports of the leader."""

    steps: int
    """Of what this node's ranks are told."""
    meeting: int
    """Of the store through which all ranks meet."""


class NodeRejected(msgspec.Struct, tag="refused", frozen=True):
    """Stay out."""

    reason: str


ToRank = LoadModel | Run | ReadLogits | CopyPages | AdapterFetched | AddAdapter | RemoveAdapter | End
FromNode = Hello | Progress | FetchDone | NodeFailed
ToNode = Welcome | NodeRejected
