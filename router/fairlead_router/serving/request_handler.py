"""The router's front: who asks, whether they may, and when; behind it the proxy."""

from collections.abc import Coroutine
from typing import Any

from fairlead_index.redis.scripts import Scripts
from fairlead_router.config import RouterConfig
from fairlead_router.errors import ApiError
from fairlead_router.metrics import Metrics
from fairlead_router.request.client_request import Call
from fairlead_router.request.prompts import Prompt, estimate_prompt
from fairlead_router.serving.admission import Admission, Ticket
from fairlead_router.serving.proxy import Proxy
from fairlead_router.serving.upstream_request import worker_headers
from fairlead_router.tenancy.body_budget import InflightBodyBudget
from fairlead_router.tenancy.charge import Charge
from fairlead_router.tenancy.key_file import KeyStore
from fairlead_router.tenancy.quota import Account, Accounts
from fairlead_router.tenancy.tenants import Caller
from fairlead_router.wire.held_stream import HeldStream
from fairlead_router.wire.response import Reply

_BYTES_A_TOKEN = 4


class RequestHandler:
    """Owns keys, accounts and the room for bodies."""

    def __init__(self, config: RouterConfig, admission: Admission, proxy: Proxy, metrics: Metrics, scripts: Scripts | None = None) -> None:
        """`scripts`: of the service's namespace, where token rates are common to all routers."""
        self.keys = KeyStore(config.api_keys_file, metrics)
        self._accounts = Accounts(scripts, config.router_replicas, metrics.task_failures)
        self.body_budget = InflightBodyBudget(config.max_inflight_bytes)
        self._admission, self._proxy, self._metrics = admission, proxy, metrics
        metrics.body_bytes.set_function(lambda: self.body_budget.total)
        metrics.watch_tenants(self._accounts.usage)

    def start(self) -> None:
        self.keys.start()
        self._accounts.start()

    async def close(self) -> None:
        await self.keys.close()
        await self._accounts.close()

    def authenticate(self, call: Call) -> None:
        """Before anything of the body is read. Raises ApiError 401."""
        call.caller = self.keys.authenticate(call.credential)
        call.credential = b""
        call.account = self._accounts.of(call.caller.tenant)
        call.body_budget = self.body_budget

    def admit_internal(self, call: Call) -> None:
        """For a request of our own: no key, no quota, and a place in the queue like any tenant's."""
        call.account = self._accounts.of(call.caller.tenant)

    def authenticate_gateway(self, credential: bytes) -> tuple[Caller, Account]:
        """Who comes by way of a gateway. Raises ApiError 401."""
        caller = self.keys.authenticate(credential)
        return caller, self._accounts.of(caller.tenant)

    def check_quota(self, account: Account) -> None:
        """A tenant in debt is refused before its prompt costs anything. Raises ApiError 429."""
        self._admit(account, 1)

    def charge(self, account: Account, prompt: Prompt, size: int) -> Charge:
        """Take out what a request of `size` bytes will probably use. Raises ApiError 429 where the tenant's bucket does not hold it."""
        asked = prompt.params
        # Of several prompts only the first was tokenized.
        tokens = prompt.length if asked.prompts == 1 else max(prompt.length, size // _BYTES_A_TOKEN)
        charge = Charge(account, tokens, asked.max_output, asked.sequences)
        self._admit(account, charge.expected)
        charge.take()
        return charge

    def forward(self, call: Call, prompt: Prompt, reply: Reply) -> Coroutine[Any, Any, None]:
        """Charge, wait for the turn, let the proxy answer, settle. Raises ApiError where no answer has begun."""
        assert call.account is not None
        charge = self.charge(call.account, prompt, len(call.body))
        call.meter = charge.meter if call.caller.tenant.name else None
        if prompt.params.stream:
            call.held_stream = HeldStream(reply, call.id, call.path)
        return self._run(call, prompt, reply, charge)

    async def forward_unprompted(self, call: Call, reply: Reply) -> None:
        """Forward a request that needs no engine: /tokenize, /detokenize and the counting of tokens, charged as a prompt of their length.

        The OpenAPI document, which has no request body, is neither charged nor queued.
        """
        assert call.account is not None
        prompt = estimate_prompt(len(call.body), call.caller.salt(""))  # what the worker remembers of texts is the tenant's alone, too
        if call.body:
            await self._run(call, prompt, reply, self.charge(call.account, prompt, len(call.body)))
            return
        call.worker_headers = worker_headers(prompt, call.caller)
        ticket = Ticket(call.account, 0, 0, 0)
        try:
            await self._proxy.forward(call, prompt, reply, ticket)
        finally:
            self._admission.leave(ticket)

    async def _run(self, call: Call, prompt: Prompt, reply: Reply, charge: Charge) -> None:
        account = charge.account
        call.worker_headers = worker_headers(prompt, call.caller)
        keep_alive = call.held_stream.keep_alive if call.held_stream is not None else None
        ticket = Ticket(
            account, call.caller.effective_priority(prompt.params.priority), prompt.length, call.reserved_bytes, charge.expected, keep_alive
        )
        try:
            await self._admission.enter(ticket)
            await self._proxy.forward(call, prompt, reply, ticket)
        except ApiError:
            call.refused = True
            raise
        finally:
            self._admission.leave(ticket)
            computed = bool(call.attempts) and call.status < 400 and not call.refused
            difference = charge.settle(computed, call.meter is not None and bool(call.status))
            if difference and ticket.is_charged:
                account.serve(difference)

    def _admit(self, account: Account, cost: float) -> None:
        try:
            account.check(cost)
        except ApiError:
            self._metrics.refused.labels("quota").inc()
            raise
