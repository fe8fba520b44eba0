"""Azure's LLM inference traces of 2023 (AzurePublicDataset, Splitwise, ISCA 2024): arrival times and lengths, without contents."""

import csv
import random
from datetime import datetime
from itertools import islice
from pathlib import Path

from fairlead.errors import UserError, reading
from fairlead.simulate.workloads.arrivals import new_blocks
from fairlead.simulate.workloads.request import BLOCK_TOKENS, Request, explain_entry

ENTRY = "the columns are TIMESTAMP, ContextTokens and GeneratedTokens"


def read_azure(path: Path, *, count: int | None, speed: float) -> list[Request]:
    """Return the first `count` requests, `speed` times as fast. Every prompt is unique, because the file has no contents."""
    requests: list[Request] = []
    draw = random.Random(0)
    first: datetime | None = None
    with reading("--workload", path), path.open(newline="") as file:
        for number, row in enumerate(islice(csv.DictReader(file), count), start=2):
            try:
                at = datetime.fromisoformat(row["TIMESTAMP"])
                first = first or at
                prompt, output = max(1, int(row["ContextTokens"])), max(1, int(row["GeneratedTokens"]))
                seconds = (at - first).total_seconds() / speed
            except (ValueError, KeyError, TypeError) as error:
                raise UserError(f"--workload {path}, line {number}: not an Azure trace entry: {explain_entry(error)}; {ENTRY}") from None
            requests.append(Request(seconds, prompt, output, new_blocks(draw, -(-prompt // BLOCK_TOKENS))))
    if not requests:
        raise UserError(f"--workload {path}: it contains no request")
    return sorted(requests, key=lambda request: request.at)
