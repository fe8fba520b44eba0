"""Which worker a gateway's request goes to: the proxy's own policy, over endpoints that the gateway may use."""

import ipaddress
import math
from array import array
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from time import monotonic

from fairlead_common.discovery import split_address
from fairlead_common.http.inference_paths import is_inference
from fairlead_common.truncate import brief
from fairlead_router.config import RouterConfig
from fairlead_router.errors import ApiError, Headers, unavailable
from fairlead_router.fleet.scale_up_status import Coming
from fairlead_router.fleet.workers import Worker, WorkerTable
from fairlead_router.interop.picker.turn import Turn
from fairlead_router.interop.picker.visitor import Visitor
from fairlead_router.metrics import Metrics
from fairlead_router.request.prompts import PASSED, PROMPTED, Prompt, Prompts, estimate
from fairlead_router.routing.policies import Choice, Policy, Wanted
from fairlead_router.serving.request_handler import Front
from fairlead_router.serving.upstream_request import instructions_for, wanted_for
from fairlead_router.tenancy.tenants import credential

FALLBACKS = 2
"""Endpoints named after the first one: a gateway that retries goes down the list."""
MOST_RETRY_SECONDS = 60


@dataclass(frozen=True, slots=True)
class Asked:
    """What a gateway says of a request. `subset`: the endpoints that it may go to; None: all."""

    path: str
    body: bytes | None
    """None where the gateway does not show it before it has to know the worker."""
    length: int
    session: str
    subset: list[str] | None
    visitor: Visitor


@dataclass(frozen=True, slots=True)
class Picked:
    """`endpoints`: IP:PORT, best first. `tokens`: the prompt's in the format of that tag, where every one of them has it."""

    endpoints: list[str]
    turn: Turn
    tokens: "array[int] | None"
    format_tag: str
    instructions: Headers


class Picker:
    """Picks for every stream of the process."""

    def __init__(
        self,
        config: RouterConfig,
        table: WorkerTable,
        policy: Policy,
        front: Front,
        prompts: Prompts,
        metrics: Metrics,
        not_ready_reason: Callable[[], str],
        came: Callable[[int], None] = lambda tokens: None,
        coming: Coming | None = None,
    ) -> None:
        """`not_ready_reason`: empty while the router is ready, for the gateway's health checks. `came` is told of each prompt's tokens.
        `coming`: what is known of workers that start, for those that find none."""
        self._config, self._table, self._policy, self._front, self._prompts = config, table, policy, front, prompts
        self._metrics, self.not_ready_reason, self._came, self._coming = metrics, not_ready_reason, came, coming or Coming()

    @property
    def max_body_bytes(self) -> int:
        return self._config.max_body_bytes

    def check_path(self, path: str) -> None:
        """Raise ApiError 404 unless `path` is an inference path: a gateway's route may let others through, to workers' admin paths."""
        if not is_inference(path):
            self._metrics.picks.labels("404").inc()
            raise ApiError(404, f"There is no {brief(path)} here.", code="not_found")

    @property
    def max_header_bytes(self) -> int:
        return self._config.max_header_bytes

    def identify(self, headers: Mapping[bytes, bytes]) -> Visitor:
        """Before anything of the body is read. Raises ApiError: 401; 429 for a tenant whose bucket is empty."""
        caller, account = self._front.visitor(credential(headers.get(b"authorization", b""), headers.get(b"x-api-key", b"")))
        self._front.check_quota(account)
        return Visitor(caller, account, self._front.bodies)

    async def pick(self, asked: Asked) -> Picked:
        """Raises ApiError: 400 and 404 for what no worker would take, 503 without a usable endpoint, 429 when the wait is too long."""
        try:
            prompt = await self._prompt(asked)
            wanted = wanted_for(prompt, asked.visitor.caller, asked.session)
            choice = await self._choose(wanted, asked.subset)
            self._check_wait(choice)
            self._charge(asked, prompt, choice)
        except ApiError as error:
            self._metrics.picks.labels(str(error.status)).inc()
            raise
        self._metrics.picks.labels("200").inc()
        turn = Turn(self._table, self._policy, self._metrics, wanted, choice)
        first = choice.worker
        alike = (w for w in self._table.usable((), prompt.model) if w.format_tag == first.format_tag)
        # A request for the others never falls to a canary; its own may fall to them.
        others = [w for w in alike if w is not first and w.canary in ("", first.canary) and _may(w.address, asked.subset)]
        others.sort(key=Worker.expected_wait)
        tokens = prompt.tokens if first.format_tag == prompt.format_tag else None
        endpoints = [first.address, *(worker.address for worker in others[:FALLBACKS])]
        return Picked(endpoints, turn, tokens, prompt.format_tag, instructions_for(prompt, asked.visitor.caller))

    def _charge(self, asked: Asked, prompt: Prompt, choice: Choice) -> None:
        try:
            if asked.path in PROMPTED or asked.path in PASSED:
                asked.visitor.charge = self._front.charge(asked.visitor.account, prompt, len(asked.body or b""))
        except ApiError:
            self._policy.release(choice)
            raise

    async def _prompt(self, asked: Asked) -> Prompt:
        if asked.path not in PROMPTED or asked.body is None:
            return estimate(asked.length)
        if not self._table.any_usable():
            await self._prompts.check(asked.path, asked.body)
        began, caller = monotonic(), asked.visitor.caller
        prompt = await self._prompts.read(asked.path, asked.body, caller.salt, asked.session, caller.tenant.name)
        self._metrics.overhead.observe(monotonic() - began)
        self._came(prompt.length)
        return prompt

    async def _choose(self, wanted: Wanted, subset: list[str] | None) -> Choice:
        tried = {(worker.address, worker.life) for worker in self._table if not _may(worker.address, subset)}
        while (choice := await self._policy.choose(wanted, tried)) is not None:
            if _may(choice.worker.address, subset):
                return choice
            self._policy.release(choice)  # discovery named that one meanwhile, so it was not ruled out above
            tried.add((choice.worker.address, choice.worker.life))
        where = "" if subset is None else f" among the {len(subset)} endpoints that the gateway allows"
        said, again = self._coming.words, self._coming.retry_after
        raise unavailable(f"No worker is ready{where}{said}. Try again in {again} s.", retry_after=again)

    def _check_wait(self, choice: Choice) -> None:
        wait, limit = choice.worker.expected_wait(), self._config.picker_max_wait
        if not limit or wait <= limit:
            return
        self._policy.release(choice)
        retry = min(MOST_RETRY_SECONDS, max(1, math.ceil(wait - limit)))
        raise ApiError(
            429,
            f"A prompt would wait {wait:.0f} s for its turn, and at most {limit:g} s are allowed (--picker-max-wait). Try again later.",
            kind="overloaded_error",
            code="overloaded",
            headers=[(b"retry-after", b"%d" % retry)],
        )

    async def changed(self, timeout: float) -> None:
        """Something about the workers changed, or `timeout` seconds are over."""
        await self._table.changed(timeout)


def _may(address: str, subset: Collection[str] | None) -> bool:
    """Whether a gateway can send there: only to IP addresses (proposal 004), and only to those that it names, if it does."""
    host, _ = split_address(address)
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return subset is None or address in subset or host in subset
