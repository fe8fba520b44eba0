"""Bound on the answers of all clients that they have not read."""

import logging
from collections.abc import Iterable

from fairlead_common.http.client_connection import ClientConnection

logger = logging.getLogger(__name__)

UNREAD_BYTES, UNREAD_SECONDS = 256 << 20, 10.0
"""Of the unread answers of all clients, beyond which `abort_unread` disconnects those who have read too slowly for so long."""


def abort_unread(connections: Iterable[ClientConnection], now: float, most: int = UNREAD_BYTES) -> None:
    """Abort clients that do not read, the most bytes times seconds first, until the unread answers of all have at most `most` bytes.

    A client has UNREAD_SECONDS to read: sending a large answer takes some.
    """
    waiting = [(one, *one.unread(now)) for one in connections]
    excess = sum(size for _, size, _ in waiting) - most
    slow = sorted((each for each in waiting if each[2] > UNREAD_SECONDS), key=lambda each: each[1] * each[2])
    while excess > 0 and slow:
        connection, size, seconds = slow.pop()
        logger.warning(
            "a client that left %d bytes of its answer unread for %.0f s is disconnected: unread answers exceed %d MiB",
            size,
            seconds,
            most >> 20,
        )
        connection.abort()
        excess -= size
