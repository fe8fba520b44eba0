"""Patch of one module's forward. Paths, weights and the family's class are unchanged, and the patch can be undone."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn


class Unfused(Exception):
    """Why an operation keeps the family's own code."""


@dataclass(slots=True)
class Patch:
    """`forward` in place of the module's own."""

    module: nn.Module
    forward: Callable[..., Any]
    _before: Callable[..., Any] | None = field(default=None, init=False)

    def apply(self) -> None:
        self._before = vars(self.module).get("forward")
        self.module.forward = self.forward

    def undo(self) -> None:
        if self._before is None:
            del self.module.forward
        else:
            self.module.forward = self._before
