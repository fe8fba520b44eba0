"""Salts are cached because computing one is expensive; salts that clients choose must not fill the memory."""

import tracemalloc

from fairlead_index.salts import cache_salt


def test_long_salts_of_clients_are_not_cached() -> None:
    tracemalloc.start()
    try:
        salts = {cache_salt(b"secret", "tenant", f"{number}" + "x" * 100_000) for number in range(200)}
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(salts) == 200 and kept < 1_000_000
    assert (
        cache_salt(b"secret", "tenant", "x" * 300)
        == cache_salt(b"secret", "tenant", "x" * 300)
        != cache_salt(b"secret", "tenant", "x" * 301)
    )
