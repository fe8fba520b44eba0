"""LoRA adapters that the workers report, by name and content digest."""

from collections import Counter
from collections.abc import Mapping
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


class MergedAdapters:
    """All adapters by name, kept current one report at a time. If workers differ (during a reload), the most common version counts.

    Without a report the adapters of the last ones stay. `by_name` is replaced, never mutated, because threads read it.
    """

    def __init__(self) -> None:
        self.by_name: AdaptersByName = {}
        self._reports: dict[str, AdaptersByName] = {}
        self._counts: dict[str, Counter[Adapter]] = {}

    def set(self, address: str, adapters: AdaptersByName | None) -> None:
        """Replace the report of one worker; None: it has none."""
        old = self._reports.pop(address, None)
        if adapters is not None:
            self._reports[address] = adapters
        if old == adapters:
            return
        for name, adapter in (old or {}).items():
            self._counts[name][adapter] -= 1
            self._counts[name] += Counter()  # drops versions without a worker
        for name, adapter in (adapters or {}).items():
            self._counts.setdefault(name, Counter())[adapter] += 1
        changed = {*(old or ()), *(adapters or ())}
        for name in [name for name in changed if not self._counts[name]]:
            del self._counts[name]
        if self._reports and (changed or self.by_name.keys() != self._counts.keys()):
            self.by_name = {name: max(count, key=lambda adapter: (count[adapter], adapter.digest)) for name, count in self._counts.items()}
