"""Resolves branches and tags of hf:// models to commits, in the background and for all services together.

The hub is asked without a token, because the operator reads no Secret of a service. It may be unreachable for ever (air-gapped): after a
failure its endpoint is left alone for a while, so that new revisions do not wait for it again.
"""

import asyncio
import logging
import time
from collections.abc import Callable

from fairlead_operator.observed import HubModel, ModelCommit

log = logging.getLogger(__name__)
TIMEOUT = 5.0  # seconds for one request; a new revision waits for it
FRESH = 60.0  # seconds that an answer is given to other services too
BACKOFF_FIRST, BACKOFF_LONGEST = 30.0, 900.0  # seconds until an unreachable endpoint is asked again
MAX_REQUESTS = 8
MAX_KEPT = 4096

Fetch = Callable[[HubModel, str], str]  # model, endpoint → commit; blocking


class HubUnreachable(Exception):
    """No usable answer came from the endpoint."""


class HubResolver:
    """`commit` never waits: it returns None until the answer is there, and then `on_change` is called."""

    def __init__(self, endpoint: str, fetch: Fetch | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        """`endpoint`: of services without their own. Empty: nothing is resolved."""
        self._endpoint, self._fetch, self._clock = endpoint, fetch or fetch_commit, clock
        self._answers: dict[tuple[HubModel, str], tuple[float, ModelCommit]] = {}
        self._waiting: dict[tuple[HubModel, str], list[Callable[[], None]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed_until: dict[str, tuple[float, float, str]] = {}  # endpoint → time, last pause, problem
        self._slots = asyncio.Semaphore(MAX_REQUESTS)

    def commit(self, model: HubModel, on_change: Callable[[], None]) -> ModelCommit | None:
        """Return the answer; None: it is under way, and `on_change` is called once it is there."""
        endpoint = (model.endpoint or self._endpoint).rstrip("/")
        if not self._endpoint:
            return ModelCommit()
        key, now = (model, endpoint), self._clock()
        answered = self._answers.get(key)
        if answered is not None and now - answered[0] < FRESH:
            return answered[1]
        until, _, problem = self._closed_until.get(endpoint, (0.0, 0.0, ""))
        if now < until and key not in self._waiting:
            return ModelCommit(problem=_explain(model, problem), model=model)
        if key not in self._waiting:
            task = asyncio.create_task(self._resolve(key), name=f"commit of {model.repository}")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        self._waiting.setdefault(key, []).append(on_change)
        return None

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _resolve(self, key: tuple[HubModel, str]) -> None:
        model, endpoint = key
        try:
            async with self._slots, asyncio.timeout(2 * TIMEOUT):
                answer = ModelCommit(await asyncio.to_thread(self._fetch, model, endpoint), model=model)
            self._closed_until.pop(endpoint, None)
        except (HubUnreachable, TimeoutError) as error:
            pause = min(BACKOFF_LONGEST, 2 * self._closed_until.get(endpoint, (0.0, BACKOFF_FIRST / 2, ""))[1])
            problem = f"{endpoint} does not answer ({error or 'timeout'})"
            self._closed_until[endpoint] = self._clock() + pause, pause, problem
            answer = ModelCommit(problem=_explain(model, problem), model=model)
        except Exception as error:  # any refusal of the hub: the worker reports the same when it downloads
            answer = ModelCommit(
                problem=_explain(model, f"{endpoint}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"),
                model=model,
            )
        if answer.problem:
            log.info("%s", answer.problem)
        while len(self._answers) >= MAX_KEPT:
            del self._answers[next(iter(self._answers))]
        self._answers[key] = self._clock(), answer
        for on_change in self._waiting.pop(key, []):
            on_change()


def _explain(model: HubModel, problem: str) -> str:
    token = " The operator asks without the service's token." if model.needs_token else ""
    return (
        f"hf://{model.repository} has no commit, and each worker resolves {model.revision or 'the default branch'} when it starts: "
        f"{problem[:200]}.{token} Set spec.model.revision to a commit"
    )


def fetch_commit(model: HubModel, endpoint: str) -> str:
    """Ask the hub. Raises HubUnreachable, and the errors of huggingface_hub for a refusal."""
    # Imported at the first use: it takes 7 MiB, and a cluster without hf:// models needs none of it.
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    try:
        found = HfApi(endpoint=endpoint, token=False).model_info(
            model.repository, revision=model.revision or None, timeout=TIMEOUT, expand=["sha"]
        )
    except HfHubHTTPError:
        raise
    except (OfflineModeIsEnabled, OSError) as error:
        raise HubUnreachable(f"{type(error).__name__}: {error}") from None
    except Exception as error:  # the library's transport has its own errors
        if type(error).__module__.split(".")[0].startswith("http"):
            raise HubUnreachable(f"{type(error).__name__}: {error}") from None
        raise
    if not found.sha:
        raise HubUnreachable("the answer has no sha")
    return found.sha
