"""A jinja environment whose templates end: loops, macros, powers and repeated texts are bounded.

jinja bounds a single `range`, but nested loops and macros that call themselves can run for years. Steps are counted and no clock is read,
so that router and worker refuse the same conversations.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

import jinja2
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_STEPS: Final = 5_000_000
"""Passes of loops and calls of macros in one rendering: about a second. A template's passes are a few for each message and part."""
MAX_LENGTH: Final = 1 << 24
"""Characters, items or digits that `*` and `**` may make."""
_TICK: Final = "count_step"
_steps: ContextVar[list[int]] = ContextVar("steps")


class RenderingTooLong(jinja2.TemplateRuntimeError):
    """A rendering takes more steps than allowed."""


@contextmanager
def bound_steps(most: int = MAX_STEPS) -> Iterator[None]:
    """Allow `most` steps to the renderings within; those within an outer bound use its steps."""
    if _steps.get(None) is not None:
        yield
        return
    token = _steps.set([most])
    try:
        yield
    finally:
        _steps.reset(token)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Adds the count of a step to each loop and macro of a template."""

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.tests[_TICK] = _count_step

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = super()._parse(source, name, filename)
        bodies: list[Any] = [*template.find_all((nodes.For, nodes.Macro, nodes.CallBlock))]
        for node in bodies:
            # A test is a plain function in the compiled code; a call would pass through the sandbox's checks.
            tick = nodes.ExprStmt(nodes.Test(nodes.Const(0), _TICK, [], [], None, None))
            node.body.insert(0, tick.set_lineno(node.lineno))
        template.set_environment(self)
        return template

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            digits = right * max(1, left.bit_length()) if isinstance(left, int) and isinstance(right, int) else 0
            _check_length(digits)
        elif isinstance(right, int) and hasattr(left, "__len__"):
            _check_length(len(left) * right)
        elif isinstance(left, int) and hasattr(right, "__len__"):
            _check_length(left * len(right))
        return super().call_binop(context, operator, left, right)


def _check_length(length: int) -> None:
    if length > MAX_LENGTH:
        raise RenderingTooLong(f"one of its products has more than {MAX_LENGTH} characters or items; give another one with --chat-template")


def _count_step(_: Any) -> bool:
    steps = _steps.get()
    steps[0] -= 1
    if steps[0] < 0:
        raise RenderingTooLong("its loops and macros take too many passes; give another one with --chat-template")
    return True
