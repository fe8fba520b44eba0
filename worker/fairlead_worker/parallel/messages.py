"""What rank 0 tells the other ranks, and their last words. Rank 0 alone plans and samples: a step travels as its packed tensors."""

from typing import Any

import msgspec


class Join(msgspec.Struct, frozen=True):
    """What a rank is started with, as one line of JSON on its standard input."""

    directory: str
    """Of the sockets and of the file through which the ranks meet."""
    rank: int
    size: int
    config: dict[str, Any]


class Load(msgspec.Struct, tag="load", frozen=True):
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


class Look(msgspec.Struct, tag="look", frozen=True):
    """The logits of some of the last pass's places: each rank's head has a part of the vocabulary."""

    start: int
    stop: int


class Copy(msgspec.Struct, tag="copy", frozen=True):
    """Copies between the device and the host tier, as a plan has them."""

    saves: list[tuple[int, int]]
    loads: list[tuple[int, int]]


class End(msgspec.Struct, tag="end", frozen=True):
    """Nothing more will come."""


class LastWords(msgspec.Struct, frozen=True):
    """Why a rank ends."""

    rank: int
    reason: str


ToRank = Load | Run | Look | Copy | End
