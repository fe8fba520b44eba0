"""Resolves branches and tags of hf:// models to commits, in the background and for all services together.

Only the hub of the operator's configuration is asked, and no redirect is followed: a service's own endpoint is a URL that a user chose, and
the operator may reach addresses that this user may not. The hub is asked without a token, because the operator reads no Secret of a
service. It may be unreachable for ever (air-gapped): after a failure it is left alone for a while, so that new revisions do not wait again.
"""

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable
from urllib.parse import quote

import aiohttp
from yarl import URL

from fairlead_operator.observed import HubModel, ModelCommit

log = logging.getLogger(__name__)
LONGEST_WAIT = 10.0  # seconds that a new revision waits, with the queue
TIMEOUT = 5.0  # seconds for one request
FRESH = 60.0  # seconds that an answer is given to other services too
BACKOFF_FIRST, BACKOFF_LONGEST = 30.0, 900.0  # seconds until an unreachable hub is asked again
MAX_REQUESTS = 8
MAX_KEPT = 4096
_COMMIT = re.compile("[0-9a-f]{40}")

Fetch = Callable[[HubModel, str], Awaitable[str]]  # model, endpoint → commit


class HubUnreachable(Exception):
    """No answer came from the hub."""


class HubRefused(Exception):
    """The hub answered without a commit."""


class HubResolver:
    """`commit` never waits: it returns None until the answer is there, and then `on_change` is called."""

    def __init__(self, endpoint: str, fetch: Fetch | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        """`endpoint`: URL of the only hub that is asked. Empty: nothing is resolved."""
        self._endpoint, self._fetch, self._clock = endpoint.rstrip("/"), fetch or fetch_commit, clock
        self._answers: dict[HubModel, tuple[float, ModelCommit]] = {}
        self._waiting: dict[HubModel, list[Callable[[], None]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed_until, self._pause, self._problem = 0.0, 0.0, ""  # after a failure: time, last pause in seconds, what happened
        self._slots = asyncio.Semaphore(MAX_REQUESTS)

    def commit(self, model: HubModel, on_change: Callable[[], None]) -> ModelCommit | None:
        """Return the answer; None: it is under way, and `on_change` is called once it is there."""
        if not self._endpoint:
            return ModelCommit()
        if model.endpoint and model.endpoint.rstrip("/") != self._endpoint:
            reason = f"the operator asks only {self._endpoint} (hub.endpoint of the chart), and the hub of this service is {model.endpoint}"
            return _without_commit(model, reason)
        answered = self._answers.get(model)
        if answered is not None and self._clock() - answered[0] < FRESH:
            return answered[1]
        if self._is_closed() and model not in self._waiting:
            return _without_commit(model, self._problem)
        if model not in self._waiting:
            task = asyncio.create_task(self._resolve(model), name=f"commit of {model.repository}")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        self._waiting.setdefault(model, []).append(on_change)
        return None

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _resolve(self, model: HubModel) -> None:
        try:
            async with asyncio.timeout(LONGEST_WAIT), self._slots:
                answer = _without_commit(model, self._problem) if self._is_closed() else await self._ask(model)
        except TimeoutError:  # the hub may be well: other requests were before this one
            answer = _without_commit(model, f"{self._endpoint} has not answered within {LONGEST_WAIT:.0f} s")
        except Exception as error:  # any refusal of the hub: the worker reports the same when it downloads
            answer = _without_commit(model, f"{self._endpoint}: {type(error).__name__}: {str(error).partition(chr(10))[0]}")
        if answer.problem:
            log.info("%s", answer.problem)
        while len(self._answers) >= MAX_KEPT:
            del self._answers[next(iter(self._answers))]
        self._answers[model] = self._clock(), answer
        for on_change in self._waiting.pop(model, []):
            on_change()

    async def _ask(self, model: HubModel) -> ModelCommit:
        try:
            commit = await self._fetch(model, self._endpoint)
        except HubUnreachable as error:
            self._problem = f"{self._endpoint} does not answer ({error})"
            if not self._is_closed():  # concurrent requests that fail together are one failure
                self._pause = min(BACKOFF_LONGEST, 2 * self._pause or BACKOFF_FIRST)
                self._closed_until = self._clock() + self._pause
            return _without_commit(model, self._problem)
        self._closed_until = self._pause = 0.0
        return ModelCommit(commit, model=model)

    def _is_closed(self) -> bool:
        return self._clock() < self._closed_until


def _without_commit(model: HubModel, problem: str) -> ModelCommit:
    token = " The operator asks without the service's token." if model.needs_token else ""
    text = (
        f"hf://{model.repository} has no commit, and each worker resolves {model.revision or 'the default branch'} when it starts: "
        f"{problem[:200]}.{token} Set spec.model.revision to a commit"
    )
    return ModelCommit(problem=text, model=model)


async def fetch_commit(model: HubModel, endpoint: str) -> str:
    """Ask the hub, as `HfApi.model_info` does. Raises HubUnreachable and HubRefused.

    huggingface_hub would block a thread, follow redirects to any host and take 7 MiB.
    """
    revision = f"/revision/{quote(model.revision, safe='')}" if model.revision else ""
    url = URL(f"{endpoint}/api/models/{model.repository}{revision}?expand=sha", encoded=True)
    timeout = aiohttp.ClientTimeout(total=TIMEOUT)
    try:
        async with aiohttp.ClientSession(trust_env=True, timeout=timeout) as session, session.get(url, allow_redirects=False) as answer:
            if 300 <= answer.status < 400:
                raise HubRefused(f"it redirects to {answer.headers.get('Location', '')}, which the operator does not follow")
            if answer.status != 200:
                raise HubRefused(f"status {answer.status} {answer.reason or ''}")
            found = await answer.json(content_type=None)
    except TimeoutError:
        raise HubUnreachable(f"no answer within {TIMEOUT:.0f} s") from None
    except (aiohttp.ClientError, OSError) as error:
        raise HubUnreachable(f"{type(error).__name__}: {error}") from None
    except ValueError:
        raise HubRefused("the answer is not JSON") from None
    commit = found.get("sha") if isinstance(found, dict) else None
    if not isinstance(commit, str) or _COMMIT.fullmatch(commit) is None:
        raise HubRefused("the answer has no commit")
    return commit
