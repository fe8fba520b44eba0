"""Mooncake traces: one request per line."""

import json
import math
from array import array
from itertools import islice
from pathlib import Path

from fairlead.errors import UserError, reading
from fairlead.simulate.workloads.request import Request, explain_entry
from fairlead_index.hashing import extend

MOST_TOKENS = 100_000_000
"""Upper limit of a prompt or an answer: ten times the longest context in use. A larger value is a mistake in the trace."""

ENTRY = "a line is a JSON object with the numbers timestamp (milliseconds), input_length and output_length, and the list hash_ids"


def read_trace(path: Path, *, count: int | None, speed: float) -> list[Request]:
    """Return the first `count` requests by time, `speed` times as fast. The trace's ids are chained already; hashing spreads them."""
    requests = []
    hashed: dict[int, int] = {}
    with reading("--workload", path), path.open() as file:
        for number, line in enumerate(islice(file, count), start=1):
            if not line.strip():
                continue
            try:
                entry = json.loads(line)
                ids = [int(each) for each in entry["hash_ids"]]
                blocks = array("Q", [hashed.setdefault(each, extend(0, [each])) for each in ids])
                at, prompt, output = entry["timestamp"] / 1000, int(entry["input_length"]), int(entry["output_length"])
                if not (0 <= at < math.inf and 0 <= prompt <= MOST_TOKENS and 0 <= output <= MOST_TOKENS):
                    raise ValueError(f"a number is below 0, infinite, or a length above {MOST_TOKENS}")
                requests.append(Request(at / speed, max(1, prompt), max(1, output), blocks))
            except (ValueError, KeyError, TypeError, OverflowError) as error:
                raise UserError(f"--workload {path}, line {number}: not a Mooncake trace entry: {explain_entry(error)}; {ENTRY}") from None
    if not requests:
        raise UserError(f"--workload {path}: it contains no request")
    return sorted(requests, key=lambda request: request.at)
