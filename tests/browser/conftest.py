"""One browser for the session, and a new user for each test, who must have met no problem at the end."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack

import pytest
import pytest_asyncio
from playwright.async_api import Browser
from tests.browser.visitor import Visitor, start_browser, visit
from tests.servers import chromium

Visit = Callable[..., Awaitable[Visitor]]


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def browser() -> AsyncIterator[Browser]:
    """Tests that use it have the mark `asyncio(loop_scope="session")`: the browser belongs to one event loop."""
    if not chromium.launcher().exists():
        pytest.skip("no Chromium on this machine: make chromium")
    async with start_browser() as browser:
        yield browser


@pytest_asyncio.fixture(loop_scope="session")
async def new_visitor(browser: Browser) -> AsyncIterator[Visit]:
    """Return a function that takes the parameters of `visit` after the browser. A problem of any page fails the test."""
    visitors: list[Visitor] = []
    async with AsyncExitStack() as stack:

        async def create(*args: object, **options: object) -> Visitor:
            visitors.append(await stack.enter_async_context(visit(browser, *args, **options)))  # type: ignore[arg-type]
            return visitors[-1]

        yield create
        problems = [problem for visitor in visitors for problem in visitor.problems]
        assert not problems, "\n".join(problems)
