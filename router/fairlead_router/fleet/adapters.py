"""The LoRA adapters that workers tell of: which name is which content."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec


class Adapter(msgspec.Struct, frozen=True):
    """One adapter of one worker, as `/load` says it."""

    digest: str = ""
    """Of its content: part of the root of its blocks' hashes."""
    root: str = ""
    """Where it comes from."""
    parent: str = ""
    """The model that it changes."""

    def model_fields(self, max_model_len: int | None) -> dict[str, Any]:
        """As in vLLM's model objects."""
        return {"root": self.root, "parent": self.parent or None, "max_model_len": max_model_len}


AdaptersByName = Mapping[str, Adapter]
"""By name."""


def merge_adapters(told: Iterable[AdaptersByName]) -> dict[str, Adapter]:
    """Every name; where workers differ in what it is (one was reloaded, the others not yet), as most of them have it."""
    found: dict[str, Counter[Adapter]] = {}
    for adapters in told:
        for name, adapter in adapters.items():
            found.setdefault(name, Counter())[adapter] += 1
    return {name: max(count, key=lambda one: (count[one], one.digest)) for name, count in found.items()}
