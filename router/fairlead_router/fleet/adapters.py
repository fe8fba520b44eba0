"""LoRA adapters that the workers report, by name and content digest."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec


class Adapter(msgspec.Struct, frozen=True):
    """One adapter of one worker, as `/load` reports it."""

    digest: str = ""
    """Digest of the adapter's content; part of the root of its block hashes."""
    root: str = ""
    """Source of the adapter."""
    parent: str = ""
    """Base model."""

    def model_fields(self, max_model_len: int | None) -> dict[str, Any]:
        """Return the fields of vLLM's model objects."""
        return {"root": self.root, "parent": self.parent or None, "max_model_len": max_model_len}


AdaptersByName = Mapping[str, Adapter]
"""A worker's adapters by name."""


def merge_adapters(reports: Iterable[AdaptersByName]) -> dict[str, Adapter]:
    """Return all adapters by name. If workers differ (during a reload), the most common version counts."""
    found: dict[str, Counter[Adapter]] = {}
    for adapters in reports:
        for name, adapter in adapters.items():
            found.setdefault(name, Counter())[adapter] += 1
    return {name: max(count, key=lambda adapter: (count[adapter], adapter.digest)) for name, count in found.items()}
