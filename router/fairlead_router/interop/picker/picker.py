"""Choice of the worker for a gateway's request: the proxy's policy, limited to the endpoints that the gateway may use."""

import ipaddress
import math
from array import array
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from time import monotonic

from fairlead_common.discovery import split_address
from fairlead_common.http.inference_paths import is_inference
from fairlead_common.protocols.paths import CHAT, COMPUTED, TOKENIZED
from fairlead_common.truncate import truncate
from fairlead_router.config import RouterConfig
from fairlead_router.errors import ApiError, Headers, unavailable
from fairlead_router.fleet.scale_up_status import ScaleUpStatus
from fairlead_router.fleet.workers import WorkerTable
from fairlead_router.interop.picker.gateway_request import GatewayRequest
from fairlead_router.interop.picker.pick_session import PickSession
from fairlead_router.metrics import Metrics
from fairlead_router.request.engine_rendering import EngineRendering
from fairlead_router.request.prompts import Prompt, Prompts, estimate_prompt
from fairlead_router.routing.policies import Choice, Policy
from fairlead_router.serving.request_handler import RequestHandler, worker_headers
from fairlead_router.tenancy.class_selection import HEADER
from fairlead_router.tenancy.tenants import read_credential

MOST_WAIT_SECONDS = 60.0
"""Expected wait above which a request gets 429."""
FALLBACKS = 2
"""Endpoints listed after the first one, for a gateway's retries."""
MOST_RETRY_SECONDS = 60


@dataclass(frozen=True, slots=True)
class PickRequest:
    """Request as a gateway describes it. `subset`: the allowed endpoints; None: all."""

    path: str
    body: bytes | None
    """None if the gateway does not send the body before the choice."""
    length: int
    session: str
    subset: list[str] | None
    client: GatewayRequest


@dataclass(frozen=True, slots=True)
class PickResult:
    """Choice for one request. `endpoints`: IP:PORT, best first. `tokens`: of the prompt, if all endpoints have the format `format_tag`."""

    endpoints: list[str]
    session: PickSession
    tokens: "array[int] | None"
    format_tag: str
    instructions: Headers


class Picker:
    """Endpoint picker shared by all streams of the process."""

    def __init__(
        self,
        config: RouterConfig,
        table: WorkerTable,
        policy: Policy,
        handler: RequestHandler,
        prompts: Prompts,
        rendering: EngineRendering,
        metrics: Metrics,
        not_ready_reason: Callable[[], str],
        count_prompt: Callable[[int], None] = lambda tokens: None,
        scale_up: ScaleUpStatus | None = None,
    ) -> None:
        """`not_ready_reason`: empty while the router is ready, for the gateway's health checks. `count_prompt`: called with each prompt's
        tokens. `scale_up`: status of starting workers, for the error without a worker.
        """
        self._config, self._table, self._policy, self._handler, self._prompts = config, table, policy, handler, prompts
        self._rendering, self._metrics, self.not_ready_reason = rendering, metrics, not_ready_reason
        self._count_prompt, self._scale_up = count_prompt, scale_up or ScaleUpStatus()

    @property
    def session_header(self) -> bytes:
        return self._config.session_header.encode()

    @property
    def max_body_bytes(self) -> int:
        return self._config.max_body_bytes

    def check_path(self, path: str) -> None:
        """Raise ApiError 404 unless `path` is an inference path: a gateway's route may let others through, to workers' admin paths."""
        if not is_inference(path):
            raise ApiError(404, f"There is no inference path {truncate(path)} here.", code="not_found")

    def authenticate(self, headers: Mapping[bytes, bytes]) -> GatewayRequest:
        """Authenticate a request before its body is read. Raises ApiError: 401; 429 for a tenant in debt; 400 and 403 for the class."""
        credential = read_credential(headers.items())
        requested_class = headers.get(HEADER, b"").decode("latin-1").strip()
        caller, account, service_class = self._handler.authenticate_gateway(credential, requested_class)
        self._handler.check_quota(account)
        return GatewayRequest(caller, account, self._handler.body_budget, service_class)

    async def pick(self, request: PickRequest) -> PickResult:
        """Choose the endpoints of a request.

        Raises ApiError: 400 and 404 for a request that no worker accepts, 503 without a usable endpoint, 429 when the wait is too long.
        """
        prompt = await self._prompt(request)
        choice = await self._choose(prompt, request.subset)
        self._check_wait(choice)
        self._charge(request, prompt, choice)
        session = PickSession(self._table, self._policy, self._metrics, prompt, choice, prompt.params.stream)
        first, now = choice.worker, monotonic()
        alike = (w for w in self._table.usable((), prompt.model) if w.format_tag == first.format_tag)
        # A stable request never falls back to a canary; a canary's request may fall back to stable workers.
        others = [w for w in alike if w is not first and w.canary in ("", first.canary) and _is_allowed(w.address, request.subset)]
        others.sort(key=lambda worker: worker.expected_ttft(now))
        tokens = prompt.tokens if first.format_tag == prompt.format_tag else None
        endpoints = [first.address, *(worker.address for worker in others[:FALLBACKS])]
        client = request.client
        instructions = worker_headers(prompt, client.caller, client.service_class)
        instructions += self._handler.response_headers(request.path, prompt, client.caller)
        return PickResult(endpoints, session, tokens, prompt.format_tag, instructions)

    def _charge(self, request: PickRequest, prompt: Prompt, choice: Choice) -> None:
        try:
            if request.path in COMPUTED or request.path in TOKENIZED:
                request.client.charge = self._handler.charge(request.client.account, prompt, len(request.body or b""))
                request.client.is_reported = not choice.worker.runtime
        except ApiError:
            self._policy.release(choice)
            raise

    async def _prompt(self, request: PickRequest) -> Prompt:
        if request.path not in COMPUTED or request.body is None:
            if request.body is not None:
                await self._prompts.check_size(request.body, request.client.account.use)
            prompt = estimate_prompt(request.length, session=request.client.caller.session(request.session))
            request.client.account.use(prompt.price)
            return prompt
        began, caller, pay = monotonic(), request.client.caller, request.client.account.use
        if not self._table.any_usable():
            await self._prompts.validate(request.path, request.body, caller.tenant.name, pay)
        prompt = await self._prompts.read(request.path, request.body, caller, request.session, pay)
        if request.path == CHAT:
            prompt = await self._rendering.correct(request.body, prompt)
        self._metrics.overhead.observe(monotonic() - began)
        service_class = request.client.service_class
        self._count_prompt(0 if service_class is not None and service_class.is_best_effort else prompt.prompt_tokens)
        return prompt

    async def _choose(self, prompt: Prompt, subset: list[str] | None) -> Choice:
        tried = {(worker.address, worker.generation) for worker in self._table if not _is_allowed(worker.address, subset)}
        while (choice := await self._policy.choose(prompt, tried)) is not None:
            if _is_allowed(choice.worker.address, subset):
                return choice
            self._policy.release(choice)  # discovery added this worker meanwhile, so it was not excluded above
            tried.add((choice.worker.address, choice.worker.generation))
        where = "" if subset is None else f" among the {len(subset)} endpoints that the gateway allows"
        status, again = self._scale_up.description, self._scale_up.retry_after
        raise unavailable(f"No worker is ready{where}{status}. Try again in {again} s.", retry_after=again)

    def _check_wait(self, choice: Choice) -> None:
        wait = choice.worker.expected_ttft(monotonic())
        if wait <= MOST_WAIT_SECONDS:
            return
        self._policy.release(choice)
        retry = min(MOST_RETRY_SECONDS, max(1, math.ceil(wait - MOST_WAIT_SECONDS)))
        raise ApiError(
            429,
            f"The expected wait is {wait:.0f} s, above the limit of {MOST_WAIT_SECONDS:g} s. Try again in {retry} s.",
            kind="overloaded_error",
            code="overloaded",
            headers=[(b"retry-after", b"%d" % retry)],
        )

    def count(self, status: int) -> None:
        """Count a request: 200 with a choice, or the status of its refusal."""
        self._metrics.picks.labels(str(status)).inc()

    async def wait_for_change(self, timeout: float) -> None:
        """Return at the next change of the workers, or after `timeout` seconds."""
        await self._table.wait_for_change(timeout)


def _is_allowed(address: str, subset: Collection[str] | None) -> bool:
    """Return whether a gateway can use the address: only IP addresses (proposal 004), and only those in its subset, if any."""
    host, _ = split_address(address)
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return subset is None or address in subset or host in subset
