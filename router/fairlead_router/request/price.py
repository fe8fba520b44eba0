"""The price of reading a body, in tokens of the tenant's quota. It is paid whether or not the request is refused.

A token of the quota buys 4 µs of the router's CPU: an ordinary short request (128 tokens) takes about 0.5 ms. So a tenant causes no more
work by refused requests than by answered ones. The constants are µs of CPU, measured in November 2026.
`python -m bench router/hostile_clients` compares the price of each kind of input with its CPU time.
"""

from typing import Final

from fairlead_common.json_size import JsonSize

MICROSECONDS_A_TOKEN: Final = 4.0
BYTE: Final = 0.003
"""Counting, copying and decoding."""
OBJECT: Final = 0.2
"""An object, list or key, decoded and walked through."""
VALUE: Final = 0.02
MOVED: Final = 0.0015
"""A byte that is received, and for a large body copied to the process that reads it."""
PIECE: Final = 0.45
"""A chunk of a chunked body, or another piece in which it is parsed."""
MESSAGE: Final = 100.0
"""A gateway's message with a piece of a body."""
FORWARDED: Final = 500.0
"""A request that the batch server answers, that a worker answers without a prompt, or that a worker refuses."""
STORED: Final = 2000.0
"""A request that changes a file or a batch: the batch server writes and syncs its record."""
UPLOADED: Final = 0.0025
"""A byte of a body that the batch server stores, with its passage through the router."""
DOWNLOADED: Final = 0.0015
"""A byte that the batch server reads, with its passage through the router."""
RENDERED: Final = 2500.0
"""A page of the console."""
REFUSED: Final = 100.0
"""A request that the router refuses, beside its reading: its connection, head and error."""
LEFT: Final = 1000.0
"""A request whose client leaves before its answer, beside its reading and what the worker reports: router and worker close and open their
connections again, and the engine gets and drops a request."""
TOKENIZED: Final = 1.0
"""A token of a prompt, tokenized and hashed."""

TOKEN_PRICE: Final = TOKENIZED / MICROSECONDS_A_TOKEN
FORWARDED_PRICE: Final = FORWARDED / MICROSECONDS_A_TOKEN
MESSAGE_PRICE: Final = MESSAGE / MICROSECONDS_A_TOKEN
RENDERED_PRICE: Final = RENDERED / MICROSECONDS_A_TOKEN
REFUSED_PRICE: Final = REFUSED / MICROSECONDS_A_TOKEN
LEFT_PRICE: Final = LEFT / MICROSECONDS_A_TOKEN


def price_of(size: int, nodes: JsonSize, tokens: int) -> float:
    """Return the price of a body of `size` bytes, of which `tokens` were tokenized."""
    return (BYTE * size + OBJECT * nodes.objects + VALUE * nodes.values) / MICROSECONDS_A_TOKEN + TOKEN_PRICE * tokens


def price_of_cpu(size: int, cpu_seconds: float) -> float:
    """Return the price of a body of `size` bytes that took so much CPU time to read or refuse. It is known only afterwards."""
    return (MOVED * size + 1e6 * cpu_seconds) / MICROSECONDS_A_TOKEN


def price_of_batch_request(is_change: bool, received: int, sent: int) -> float:
    """Return the price of a request to the batch server with bodies of so many bytes, without what the batch server reports."""
    return ((STORED if is_change else FORWARDED) + UPLOADED * received + DOWNLOADED * sent) / MICROSECONDS_A_TOKEN


def price_of_pieces(pieces: int) -> float:
    """Return the price of parsing a body that came in so many pieces."""
    return PIECE * pieces / MICROSECONDS_A_TOKEN


def price_of_report(header: bytes | None) -> float:
    """Return the price of the CPU time, in milliseconds, that a worker reports beyond what tokens pay (`api/request_cpu.py`)."""
    return 1000 * int(header) / MICROSECONDS_A_TOKEN if header is not None and header.isdigit() and len(header) <= 6 else 0.0
