"""Token quotas: one token bucket for each tenant, which all routers share through Redis.

No request waits for Redis: four times a second a router reports its tenants' usage and reads their buckets' levels. A tenant can therefore
exceed its rate briefly, by at most what it sends to all routers within a quarter of a second. The bucket then goes below zero and refuses
requests until the debt is paid back. Over time the rate holds exactly.
"""

import asyncio
import logging
import math
import os
from collections.abc import Callable, Iterable
from time import monotonic

from prometheus_client import Counter

from fairlead_index.redis.connection import BadReply
from fairlead_index.redis.replies import as_number
from fairlead_index.redis.scripts import REDIS_ERRORS, Scripts
from fairlead_router.errors import ApiError, Headers
from fairlead_router.supervision import stop_tasks, supervise
from fairlead_router.tenancy.tenants import Tenant

logger = logging.getLogger(__name__)

SYNC_SECONDS = 0.25
HEARTBEAT_SECONDS = 5.0
"""Interval at which a router without usage reports its presence: the others divide rates by the number of routers without Redis."""
FIRST_OUTPUT = 256.0
"""Expected tokens of a tenant's first answer."""
_DECAY = 0.9


class Account:
    """One tenant at this router: its token bucket, and its served tokens for the fair queue."""

    def __init__(self, tenant: Tenant, share: Callable[[], float], clock: Callable[[], float] = monotonic) -> None:
        self.tenant = tenant
        self.is_limited = tenant.rate > 0
        """An attribute, because each request reads it several times."""
        self.served_tokens = 0.0
        """Served tokens divided by weight: the virtual counter of the fair queue."""
        self.unreported = 0.0
        """Used tokens that were not reported to Redis yet."""
        self.prompt_tokens = self.output_tokens = 0
        """Tokens used since the start."""
        self.level = tenant.burst * share()
        self._share, self._clock = share, clock
        self._stamp = clock()
        self._output = FIRST_OUTPUT

    @property
    def capacity(self) -> float:
        return self.tenant.burst * self._share()

    def set_tenant(self, tenant: Tenant) -> None:
        """Apply a new version of the tenant from the key file."""
        self.refill()
        self.level += (tenant.burst - self.tenant.burst) * self._share()
        self.tenant, self.is_limited = tenant, tenant.rate > 0

    def refill(self) -> float:
        """Refill the bucket and return its level; negative while the tenant is in debt."""
        now = self._clock()
        self.level = min(self.capacity, self.level + (now - self._stamp) * self.tenant.rate * self._share())
        self._stamp = now
        return self.level

    def apply_shared_level(self, level: float, sent: float) -> None:
        """Apply the level shared by all routers, which includes `sent` tokens of this router's usage."""
        self.unreported -= sent
        self.level, self._stamp = level - self.unreported, self._clock()

    def estimate_cost(self, prompt: int, max_output: int | None, choices: int) -> float:
        """Return a request's expected tokens: its prompt, and answers as long as this tenant's recent ones."""
        each = self._output if max_output is None else min(self._output, max_output)
        return prompt + each * choices

    def check(self, cost: float, paid: float = 0.0) -> None:
        """Raise ApiError 429 unless the bucket holds `cost` or is full: a cost larger than the bucket leaves it in debt.

        `paid`: tokens of the cost that were taken already.
        """
        if not self.is_limited:
            return
        lacking = min(cost, self.capacity) - paid - self.refill()
        if lacking <= 0:
            return
        seconds = max(1, math.ceil(lacking / (self.tenant.rate * self._share())))
        limit = f"{self.tenant.rate * 60:.0f} tokens a minute"
        reason = f"this request needs about {cost:.0f} tokens" if cost else "earlier requests used more than a full bucket beyond it"
        raise ApiError(
            429,
            f"Rate limit of {limit} reached; {reason}. Try again in {seconds} s.",
            kind="tokens",
            code="rate_limit_exceeded",
            headers=[(b"retry-after", b"%d" % seconds), *self.headers()],
        )

    def use(self, tokens: float) -> None:
        """Take tokens out of the bucket. A negative number puts unused ones back."""
        if self.is_limited:
            self.refill()
            self.level -= tokens
            self.unreported += tokens

    def serve(self, tokens: float) -> None:
        """Add to the fair queue's counter, or subtract: tenants with a lower counter go first."""
        self.served_tokens += tokens / self.tenant.weight

    def record_usage(self, prompt: int, output: int) -> None:
        """Record a request's actual usage."""
        self.prompt_tokens += prompt
        self.output_tokens += output
        self._output = _DECAY * self._output + (1 - _DECAY) * output

    def headers(self) -> Headers:
        """Return OpenAI's x-ratelimit-*-tokens headers."""
        if not self.is_limited:
            return []
        left = self.refill()
        full = max(0.0, self.capacity - left) / (self.tenant.rate * self._share())
        return [
            (b"x-ratelimit-limit-tokens", b"%d" % self.tenant.burst),
            (b"x-ratelimit-remaining-tokens", b"%d" % max(0, int(left))),
            (b"x-ratelimit-reset-tokens", _span(full)),
        ]


class Accounts:
    """Accounts of all tenants. With Redis the routers share one bucket for each; without it each router has its fraction."""

    def __init__(self, scripts: Scripts | None, replicas: int, failures: Counter) -> None:
        """`failures`: counter of task failures, by name."""
        self._accounts: dict[str, Account] = {}
        self._replicas = replicas
        self._name = os.urandom(8).hex()
        self._sent: list[tuple[Account, float]] = []
        self._number = 0
        """Number of the call that reports `_sent`. A call without a reply is repeated unchanged, and charges once."""
        self._scripts, self._failures = scripts, failures
        self.is_shared = False
        """Whether all routers share the buckets: Redis answered the last call."""
        self._syncing: asyncio.Task[None] | None = None

    def start(self) -> None:
        if (scripts := self._scripts) is not None:
            self._syncing = supervise("token quotas", lambda: self._follow(scripts), self._failures)

    async def close(self) -> None:
        await stop_tasks(self._syncing)
        if self._scripts is not None:
            await self._scripts.close()

    def usage(self) -> list[tuple[str, int, int]]:
        """Return the tenants with their prompt and output tokens since the start."""
        return [(name, one.prompt_tokens, one.output_tokens) for name, one in self._accounts.items() if name]

    def of(self, tenant: Tenant) -> Account:
        account = self._accounts.get(tenant.name)
        if account is None:
            account = self._accounts[tenant.name] = Account(tenant, self._share)
        elif account.tenant is not tenant and account.tenant != tenant:
            account.set_tenant(tenant)
        return account

    def _share(self) -> float:
        return 1.0 if self.is_shared else 1.0 / self._replicas

    async def _follow(self, scripts: Scripts) -> None:
        reported_at = -HEARTBEAT_SECONDS
        while True:
            changing = [one for one in self._accounts.values() if one.is_limited and (one.unreported or one.refill() < one.capacity)]
            if changing or monotonic() - reported_at >= HEARTBEAT_SECONDS:
                try:
                    await self._sync(scripts, changing)
                    reported_at = monotonic()
                except REDIS_ERRORS as error:
                    self._fall_back(error)
                except Exception as error:  # a bug: until the task restarts, the shared levels are unknown
                    self._fall_back(error)
                    raise
            await asyncio.sleep(SYNC_SECONDS)

    async def _sync(self, scripts: Scripts, accounts: Iterable[Account]) -> None:
        if not self._sent:
            self._sent = [(account, account.unreported) for account in accounts]
            self._number += 1
        args: list[str | float] = []
        for account, used in self._sent:
            args += [account.tenant.name, account.tenant.rate, account.tenant.burst, used]
        replicas, *levels = [
            as_number(value, "the reply of quota") for value in await scripts.call("quota", self._name, self._number, *args)
        ]
        if len(levels) != len(self._sent):
            raise BadReply(f"the reply of quota has {len(levels)} levels for {len(self._sent)} tenants: is it the index's Redis?")
        sent, self._sent = self._sent, []
        if not self.is_shared:
            logger.info("token quotas are shared by %d routers", replicas)
        self.is_shared, self._replicas = True, max(1, int(replicas))
        for (account, used), level in zip(sent, levels, strict=True):
            account.apply_shared_level(level, used)

    def _fall_back(self, error: Exception) -> None:
        if self.is_shared:
            logger.warning(
                "token quotas: no answer from Redis (%s); this router grants each tenant 1/%d of its rate",
                type(error).__name__,
                self._replicas,
            )
            for account in self._accounts.values():
                account.refill()
        self.is_shared = False


def _span(seconds: float) -> bytes:
    """Format a duration as OpenAI does: `350ms`, `6m0s`."""
    if seconds < 1:
        return b"%dms" % round(seconds * 1000)
    minutes, rest = divmod(math.ceil(seconds), 60)
    return b"%dm%ds" % (minutes, rest) if minutes else b"%ds" % rest
