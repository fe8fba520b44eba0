"""A module's forward replaced on that one module: paths, weights and the family's class stay as they are, and it can be taken back."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn


class Unfused(Exception):
    """Why something stays as the family wrote it."""


@dataclass(slots=True)
class Patch:
    """`forward` in place of what `module` had."""

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
