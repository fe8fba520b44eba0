"""Real clients from PyPI, as their users install them, with one worker and its routers."""

import importlib.util
import json
import os
from collections.abc import AsyncIterator, Iterator
from typing import Any

import openai
import pytest
import pytest_asyncio
from tests.clients.either import settled
from tests.clients.endpoints import Endpoints

SECONDS = 60.0
THROUGH = os.environ.get("FAIRLEAD_CLIENTS_THROUGH", "worker router").split()
collect_ignore = [] if importlib.util.find_spec("langchain_openai") else ["frameworks"]
"""test_frameworks.py runs them in their own environment."""


@pytest.fixture(scope="session")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoints]:
    """Start a deployment for this session, or use the one in `FAIRLEAD_CLIENTS` (for suites that another session runs, or a developer)."""
    given = os.environ.get("FAIRLEAD_CLIENTS")
    if given:
        yield Endpoints(**json.loads(given))
        return
    from tests.clients.deployment import deployed  # not installed where the frameworks' suites run

    with deployed(tmp_path_factory.mktemp("clients")) as endpoints:
        yield endpoints


@pytest.fixture(scope="session", params=THROUGH)
def url(request: pytest.FixtureRequest, deployment: Endpoints) -> str:
    """The URL of worker and router in turn: a client must not notice which one it uses."""
    return getattr(deployment, request.param)


KINDS = {"worker": openai.OpenAI, "router": openai.AsyncOpenAI}
"""The blocking client asks the worker, the asynchronous one the router."""


@pytest_asyncio.fixture(scope="session", loop_scope="session", params=THROUGH)
async def api(request: pytest.FixtureRequest, deployment: Endpoints) -> AsyncIterator[openai.OpenAI | openai.AsyncOpenAI]:
    """Validate every answer: one with a field that the client's types do not allow raises APIResponseValidationError."""
    url = getattr(deployment, request.param)
    client = KINDS[request.param](base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=SECONDS, _strict_response_validation=True)
    yield client
    await settled(client.close())


@pytest_asyncio.fixture(scope="session", loop_scope="session", params=THROUGH)
async def claude(request: pytest.FixtureRequest, deployment: Endpoints) -> AsyncIterator[Any]:
    import anthropic  # not installed where the frameworks' suites run

    kinds = {"worker": anthropic.Anthropic, "router": anthropic.AsyncAnthropic}
    client = kinds[request.param](base_url=getattr(deployment, request.param), api_key="none", max_retries=0, timeout=SECONDS)
    yield client
    await settled(client.close())


@pytest.fixture(scope="session")
def lenient(api: openai.OpenAI | openai.AsyncOpenAI) -> openai.OpenAI | openai.AsyncOpenAI:
    """Return the client without validation, for the answers of OpenAI that its own types do not allow (test_openai_strict.py)."""
    return api.copy(_extra_kwargs={"_strict_response_validation": False})
