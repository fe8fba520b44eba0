"""Recorded traces: Mooncake's, with the blocks of each prompt, and Azure's, without contents."""

import csv
import json
import math
import random
from array import array
from collections.abc import Callable, Iterable
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from fairlead.errors import UserError, reading
from fairlead.simulate.workloads.generators import new_blocks
from fairlead.simulate.workloads.request import BLOCK_TOKENS, Request
from fairlead_index.hashing import extend

MOST_TOKENS = 100_000_000
"""Upper limit of a prompt or an answer: ten times the longest context in use. A larger value is a mistake in the trace."""
MOONCAKE = "a line is a JSON object with the numbers timestamp (milliseconds), input_length and output_length, and the list hash_ids"
AZURE = "the columns are TIMESTAMP, ContextTokens and GeneratedTokens"
Entry = TypeVar("Entry")


def read_mooncake(path: Path, *, count: int | None, speed: float) -> list[Request]:
    """Return the first `count` requests by time, `speed` times as fast. The trace's ids are chained already; hashing spreads them."""
    hashed: dict[int, int] = {}

    def parse(line: str) -> Request:
        entry = json.loads(line)
        ids = [int(each) for each in entry["hash_ids"]]
        blocks = array("Q", [hashed.setdefault(each, extend(0, [each])) for each in ids])
        at, prompt, output = entry["timestamp"] / 1000, int(entry["input_length"]), int(entry["output_length"])
        if not (0 <= at < math.inf and 0 <= prompt <= MOST_TOKENS and 0 <= output <= MOST_TOKENS):
            raise ValueError(f"a number is below 0, infinite, or a length above {MOST_TOKENS}")
        return Request(at / speed, max(1, prompt), max(1, output), blocks)

    with reading("--workload", path), path.open() as file:
        lines = ((number, line) for number, line in enumerate(islice(file, count), start=1) if line.strip())
        return _read_entries(path, lines, parse, "a Mooncake", MOONCAKE)


def read_azure(path: Path, *, count: int | None, speed: float) -> list[Request]:
    """Return the first `count` requests of a trace of 2023 (AzurePublicDataset, Splitwise, ISCA 2024), `speed` times as fast.

    Every prompt is unique, because the file has no contents.
    """
    draw = random.Random(0)
    first: datetime | None = None

    def parse(row: dict[str, Any]) -> Request:
        nonlocal first
        at = datetime.fromisoformat(row["TIMESTAMP"])
        first = first or at
        prompt, output = max(1, int(row["ContextTokens"])), max(1, int(row["GeneratedTokens"]))
        return Request((at - first).total_seconds() / speed, prompt, output, new_blocks(draw, -(-prompt // BLOCK_TOKENS)))

    with reading("--workload", path), path.open(newline="") as file:
        rows = enumerate(islice(csv.DictReader(file), count), start=2)
        return _read_entries(path, rows, parse, "an Azure", AZURE)


def _read_entries(
    path: Path, entries: Iterable[tuple[int, Entry]], parse: Callable[[Entry], Request], whose: str, shape: str
) -> list[Request]:
    """Return the requests of numbered entries by time. Raises UserError with the line, whose trace it should be, and its shape."""
    requests: list[Request] = []
    for number, entry in entries:
        try:
            requests.append(parse(entry))
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            reason = f"{error.args[0]} is missing" if isinstance(error, KeyError) else str(error)
            raise UserError(f"--workload {path}, line {number}: not {whose} trace entry: {reason}; {shape}") from None
    if not requests:
        raise UserError(f"--workload {path}: it contains no request")
    return sorted(requests, key=lambda request: request.at)
