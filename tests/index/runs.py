"""Chains as the `apply` script takes them, for tests that call the script directly."""

from fairlead_index.changes import Changes, pack


def along(kind: str, hashes: list[int]) -> list[bytes]:
    """Return a chain from its beginning (stored) or from its end (removed)."""
    changes = Changes()
    changes.restart()
    changes.store(hashes)
    if kind == "R":
        changes.take(len(hashes))
        changes.remove(hashes[::-1])
    return pack(changes.take(len(hashes)))
