"""CPU of reading request bodies: of the check before decoding, and of each unit that has a price.

Bodies have the sizes of real requests, or the most of one unit: objects, keys, values, bytes or tokens. `price` is what the constants say.
"""

import time
from collections.abc import Callable

import msgspec

from bench.common.report import make_parser, write_report
from bench.router.tokenization import make_format
from fairlead_common.json_size import MAX_OBJECTS, JsonSize, check_json
from fairlead_common.prompts.encoder import PromptEncoder
from fairlead_common.protocols.paths import CHAT, COMPLETIONS
from fairlead_index.hashing import prompt_root
from fairlead_router.request.body import Chain, Encoding, encode, read_fields
from fairlead_router.request.price import MICROSECONDS_A_TOKEN, price_of
from fairlead_router.request.prompts import THREAD_OBJECTS

PROSE = "The check counts, for each body: its objects [and lists], its keys and its values. "


def bodies() -> dict[str, tuple[str, bytes]]:
    """Return path and body by name."""

    def chat(turns: int, length: int) -> bytes:
        text = (PROSE * (length // len(PROSE) + 1))[:length]
        return msgspec.json.encode({"messages": [{"role": "user", "content": f"{turn} {text}"} for turn in range(turns)]})

    many = MAX_OBJECTS - 100
    return {
        "chat of 1 KiB": (CHAT, chat(2, 450)),
        "chat of 100 KiB": (CHAT, chat(100, 1000)),
        "chat of 400 KiB": (CHAT, chat(200, 2000)),
        "lists": (COMPLETIONS, msgspec.json.encode({"prompt": "x", "messages": [[]] * many})),
        "keys": (COMPLETIONS, msgspec.json.encode({"prompt": "x", "messages": {f"key {number}": 0 for number in range(many)}})),
        "values": (COMPLETIONS, msgspec.json.encode({"prompt": "x", "messages": [1.5] * 250_000})),
        "bytes": (COMPLETIONS, msgspec.json.encode({"prompt": "x", "messages": "a, " * 2_600_000})),
        "punctuation": (COMPLETIONS, msgspec.json.encode({"prompt": "! ?" * 60_000})),
    }


def least_cpu(work: Callable[[], object], repeats: int) -> float:
    """Return the least CPU time of one call in µs."""
    found = []
    for _ in range(repeats):
        began = time.process_time()
        work()
        found.append(1e6 * (time.process_time() - began))
    return min(found)


def main() -> None:
    """Print a table, and write JSON where asked."""
    parser = make_parser(__name__, __doc__)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    format = make_format()
    encoder = PromptEncoder(format)
    encoding = Encoding("", 1 << 20, [Chain("", prompt_root(format), format.block_tokens)])
    rows = {}
    print(f"{'':16}{'bytes':>10}{'check µs':>12}{'all µs':>12}{'price µs':>12}")
    for name, (path, raw) in bodies().items():

        def read(path: str = path, raw: bytes = raw) -> tuple[JsonSize, int]:
            fields, body = read_fields(path, raw, "", False, check_json(raw, 1 << 20, THREAD_OBJECTS))
            return fields.size, encode(path, body, encoder, encoding).computed

        size, tokens = read()
        row = {
            "bytes": float(len(raw)),
            "check": least_cpu(lambda raw=raw: check_json(raw, 1 << 20), options.repeats),  # type: ignore[misc]
            "all": least_cpu(read, options.repeats),
            "price": MICROSECONDS_A_TOKEN * price_of(len(raw), size, tokens),
        }
        rows[name] = row
        print(f"{name:16}" + f"{len(raw):10}" + "".join(f"{row[column]:12.1f}" for column in ("check", "all", "price")))
    write_report(__name__, options, rows)


if __name__ == "__main__":
    main()
