"""Mooncake traces: one request per line."""

import json
import math
from array import array
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from fairlead.bench.datasets import TRACE_BLOCK
from fairlead.errors import UserError
from fairlead_index.hashing import extend

BLOCK_TOKENS = TRACE_BLOCK
MOST_TOKENS = 100_000_000
"""Upper limit of a prompt or an answer: ten times the longest context in use. A larger value is a mistake in the trace."""


@dataclass(frozen=True, slots=True)
class Request:
    """`at` in seconds after the start; `blocks`: chained hashes of the prompt's blocks, the last one may be a part of a block."""

    at: float
    prompt_tokens: int
    output_tokens: int
    blocks: "array[int]"


def read_trace(path: Path, *, count: int | None, speed: float) -> list[Request]:
    """Return the first `count` requests by time, `speed` times as fast. The trace's ids are chained already; hashing spreads them."""
    requests = []
    hashed: dict[int, int] = {}
    try:
        with path.open() as file:
            for number, line in enumerate(islice(file, count), start=1):
                if not line.strip():
                    continue
                try:
                    entry = json.loads(line)
                    ids = [int(each) for each in entry["hash_ids"]]
                    blocks = array("Q", [hashed.setdefault(each, extend(0, [each])) for each in ids])
                    at, prompt, output = entry["timestamp"] / 1000, int(entry["input_length"]), int(entry["output_length"])
                    if not (0 <= at < math.inf and 0 <= prompt <= MOST_TOKENS and 0 <= output <= MOST_TOKENS):
                        raise ValueError(f"timestamp, input_length and output_length are numbers from 0 on, lengths up to {MOST_TOKENS}")
                    requests.append(Request(at / speed, max(1, prompt), max(1, output), blocks))
                except (ValueError, KeyError, TypeError, OverflowError) as error:
                    raise UserError(f"--trace {path}, line {number}: not a Mooncake trace entry ({error!r})") from None
    except OSError as error:
        raise UserError(f"--trace {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"--trace {path}: not a text file ({error.reason})") from None
    if not requests:
        raise UserError(f"--trace {path}: it contains no request")
    return sorted(requests, key=lambda request: request.at)


def rotate(requests: list[Request], share: float) -> list[Request]:
    """Return the same requests from a later moment on; the earlier ones follow at the end. Caches begin cold."""
    start = int(share * len(requests))
    if not start:
        return requests
    begin, span = requests[start].at, requests[-1].at - requests[0].at
    later = [replace(request, at=request.at - begin) for request in requests[start:]]
    return later + [replace(request, at=request.at - begin + span) for request in requests[:start]]
