"""Request handling before the proxy: authentication, quota, charging and admission."""

from collections.abc import Coroutine
from typing import Any

import xxhash

from fairlead_common.http.response import Reply
from fairlead_common.protocols.paths import RESPONSES
from fairlead_common.response_keys import new_id
from fairlead_index.redis.scripts import Scripts
from fairlead_router.config import RouterConfig
from fairlead_router.errors import ApiError, Headers
from fairlead_router.metrics import Metrics
from fairlead_router.request.client_request import Call
from fairlead_router.request.price import FORWARDED_PRICE, RENDERED_PRICE
from fairlead_router.request.prompts import Prompt, estimate_prompt
from fairlead_router.service_classes import ServiceClass
from fairlead_router.serving.admission import Admission, Ticket
from fairlead_router.serving.proxy import Proxy
from fairlead_router.serving.slo_gate import ClassTerms
from fairlead_router.tenancy.body_budget import InflightBodyBudget
from fairlead_router.tenancy.charge import Charge
from fairlead_router.tenancy.class_selection import priority_of, select_class
from fairlead_router.tenancy.key_file import KeyStore
from fairlead_router.tenancy.quota import Account, Accounts
from fairlead_router.tenancy.response_secret import ResponseSecret
from fairlead_router.tenancy.shared_secret import SharedSecret
from fairlead_router.tenancy.tenants import Caller
from fairlead_router.wire.held_stream import HeldStream

_BYTES_A_TOKEN = 4


class RequestHandler:
    """Owner of the API keys, the tenants' accounts and the budget for request bodies."""

    def __init__(self, config: RouterConfig, admission: Admission, proxy: Proxy, metrics: Metrics, scripts: Scripts | None = None) -> None:
        """`scripts`: Redis scripts in the service's namespace, through which all routers share token rates."""
        self._classes = config.service_classes
        self.keys = KeyStore(config.api_keys_file, metrics, self._classes.by_name)
        self._batch_secret = SharedSecret(config.batch_secret_file)
        self._response_secret = ResponseSecret(config.responses_secret_file)
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

    def authenticate(self, call: Call, credential: bytes) -> None:
        """Authenticate the request before its body is read. Raises ApiError: 401; 403 for a batch of an unknown tenant."""
        if call.head.acts_for is not None and self._batch_secret.matches(credential):
            call.caller, call.is_from_batch_server = self.keys.act_for(call.head.acts_for), True
        else:
            call.caller = self.keys.authenticate(credential)
        call.account = self._accounts.of(call.caller.tenant)
        call.body_budget = self.body_budget

    def is_own(self, credential: bytes) -> bool:
        """Return whether a credential is the service's own secret, which belongs to no tenant."""
        return self._batch_secret.matches(credential)

    def check_admin(self, credential: bytes, *, changes_state: bool) -> None:
        """Check the credential of an admin path on the clients' port, where clients need keys.

        Any key may read. What a tenant writes would concern all of them, so that needs the service's own secret. Raises ApiError 401, 403.
        """
        if not self.keys.is_required or self.is_own(credential):
            return
        self.keys.authenticate(credential)
        if changes_state:
            message = "A tenant's key cannot report to the router: send this to the router's --admin-port."
            raise ApiError(403, message, kind="permission_error", code="admin_port_only")

    def select_class(self, call: Call) -> None:
        """Select the class of an authenticated request. Raises ApiError: 400 for an unknown class, 403 for one that is too urgent."""
        call.service_class = select_class(self._classes, call.head.requested_class, call.caller)

    def admit_internal(self, call: Call) -> None:
        """Admit a request that the router itself makes: without key or quota, queued like a tenant's."""
        call.account = self._accounts.of(call.caller.tenant)

    def authenticate_gateway(self, credential: bytes, requested_class: str) -> tuple[Caller, Account, ServiceClass | None]:
        """Authenticate a request that comes through a gateway, and select its class. Raises ApiError as `authenticate`."""
        caller = self.keys.authenticate(credential)
        return caller, self._accounts.of(caller.tenant), select_class(self._classes, requested_class, caller)

    def check_quota(self, account: Account, cost: float = 1.0, paid: float = 0.0) -> None:
        """Raise ApiError 429 as `Account.check`, and count it. By default for a tenant in debt, before its prompt costs anything."""
        try:
            account.check(cost, paid)
        except ApiError:
            self._metrics.count_refusal("quota")
            raise

    def check_debt(self, account: Account) -> None:
        """Raise ApiError 429 for a tenant in debt by more than its bucket. Less debt lets it follow a batch that uses all of its rate."""
        self.check_quota(account, 0.0, account.capacity)

    def charge_page(self, caller: Caller) -> None:
        """Charge a page of the console to the caller's tenant. Raises ApiError 429 for one in debt."""
        account = self._accounts.of(caller.tenant)
        self.check_quota(account)
        account.use(RENDERED_PRICE)

    def charge_query(self, account: Account, size: int, workers: int) -> None:
        """Charge a query of the index with a body of `size` bytes: as a prompt of that size, and a token for each worker that it lists.

        Nothing is put back, whatever the answer: a refused query costs as much. It counts for the tenant's turn in the queue too.
        """
        tokens = size // _BYTES_A_TOKEN + workers
        account.use(tokens)
        account.serve(tokens)

    def charge(self, account: Account, prompt: Prompt, size: int) -> Charge:
        """Charge the expected tokens of a request of `size` bytes that was read. Raises ApiError 429 when the bucket has too few."""
        params = prompt.params
        # With several prompts, only the first was tokenized.
        tokens = prompt.prompt_tokens if params.prompts == 1 else max(prompt.prompt_tokens, size // _BYTES_A_TOKEN)
        charge = Charge(account, tokens, params.max_output, params.sequences, prompt.price)
        self.check_quota(account, charge.expected, charge.paid)
        charge.take()
        return charge

    def forward(self, call: Call, prompt: Prompt, reply: Reply) -> Coroutine[Any, Any, None]:
        """Charge the request, wait for admission, let the proxy answer, then settle the charge. Raises ApiError if no answer has begun."""
        assert call.account is not None
        charge = self.charge(call.account, prompt, len(call.body))
        counts_tokens = call.service_class is not None and call.service_class.itl_milliseconds is not None
        call.meter = charge.meter if call.caller.tenant.name or counts_tokens else None
        if prompt.params.stream:
            call.held_stream = HeldStream(reply, call.head.id, call.head.path)
        return self._run(call, prompt, reply, charge)

    async def forward_unprompted(self, call: Call, reply: Reply) -> None:
        """Forward a request that needs no engine: /tokenize, /detokenize and token counting, charged as prompts of their length.

        It has no class, since its answer has no tokens. Requests for stored responses and the OpenAPI document have no body: they are not
        queued, and each has the same price.
        """
        assert call.account is not None
        call.service_class = None
        caller = call.caller
        salt = caller.salt("")  # the worker's token cache is separate for each tenant too
        prompt = estimate_prompt(len(call.body), salt, caller.session(call.head.session))
        if call.body:
            call.account.use(prompt.price)
            await self._run(call, prompt, reply, self.charge(call.account, prompt, len(call.body)))
            return
        call.account.use(FORWARDED_PRICE)
        call.worker_headers = worker_headers(prompt, caller) + self._stored_response_headers(call)
        ticket = Ticket(call.account, 0, 0, 0, request=prompt)
        try:
            await self._proxy.forward(call, prompt, reply, ticket)
        finally:
            self._admission.leave(ticket)

    def response_headers(self, path: str, prompt: Prompt, caller: Caller) -> Headers:
        """Return the header with the key of the response that a request may store, and of the one that it continues."""
        if path != RESPONSES:
            return []
        return self._response_secret.headers(caller.tenant.name, new_id(), prompt.params.previous_response)

    def _stored_response_headers(self, call: Call) -> Headers:
        """Return the header with the key of the stored response in the path; empty for other paths."""
        if not call.head.path.startswith(f"{RESPONSES}/"):
            return []
        return self._response_secret.headers(call.caller.tenant.name, call.head.path.split("/")[3])

    async def _run(self, call: Call, prompt: Prompt, reply: Reply, charge: Charge) -> None:
        account = charge.account
        call.worker_headers = worker_headers(prompt, call.caller, call.service_class)
        call.worker_headers += self.response_headers(call.head.path, prompt, call.caller)
        keep_alive = call.held_stream.keep_alive if call.held_stream is not None else None
        priority = priority_of(call.service_class, call.caller, prompt.params.priority)
        terms = _terms(call.service_class, call, prompt, priority) if call.service_class is not None else None
        size, cost = call.reserved_bytes, charge.expected
        ticket = Ticket(account, priority, prompt.prompt_tokens, size, cost=cost, keep_alive=keep_alive, terms=terms, request=prompt)
        is_refused = False
        try:
            with call.span.child("queue"):
                await self._admission.enter(ticket)
            await self._proxy.forward(call, prompt, reply, ticket)
        except ApiError:
            is_refused = True
            raise
        finally:
            self._admission.leave(ticket)
            outcome = call.outcome
            is_left = not outcome.status and outcome.is_reported
            computed = bool(outcome.attempts) and outcome.status < 400 and not is_refused and not is_left
            if 400 <= outcome.status < 500 and outcome.status != 429:
                account.use(FORWARDED_PRICE)
            difference = charge.settle(computed, call.meter is not None and bool(outcome.status))
            if difference and ticket.is_charged:
                account.serve(difference)


def _terms(service_class: ServiceClass, call: Call, prompt: Prompt, priority: int) -> ClassTerms:
    tenant = call.caller.tenant.name
    key = (tenant, service_class.name, call.head.path, xxhash.xxh3_128_digest(call.body))
    return ClassTerms(service_class, prompt, priority, call.head.started_at, tenant, key)


def worker_headers(prompt: Prompt, caller: Caller, service_class: ServiceClass | None = None) -> Headers:
    """Return the router's own headers for the worker. Clients' headers of these names are not forwarded."""
    headers: Headers = []
    if prompt.salt:
        headers.append((b"x-fairlead-cache-salt", prompt.salt.encode()))
    tenant = caller.tenant.name
    if tenant:
        headers.append((b"x-fairlead-tenant", tenant.encode()))
        if prompt.params.stream:
            headers.append((b"x-fairlead-usage", b"1"))
    if tenant or service_class is not None:
        headers.append((b"x-fairlead-priority", b"%d" % priority_of(service_class, caller, prompt.params.priority)))
    return headers
