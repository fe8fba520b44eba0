"""What each tenant has used: a token bucket each, which all routers fill and empty together through Redis, between requests.

No request waits for Redis: four times a second a router tells what its tenants used, and learns what is left of their buckets. So a
tenant can use more than its rate for a moment, at most what it sends to all routers within a quarter of a second; the bucket goes below
zero then, and stays shut until that is paid back. Over time the rate holds exactly.
"""

import asyncio
import logging
import math
import os
from collections.abc import Callable, Iterable
from time import monotonic

from prometheus_client import Counter

from fairlead_index.redis.scripts import REDIS_ERRORS, Scripts
from fairlead_router.errors import ApiError, Headers
from fairlead_router.supervision import supervise
from fairlead_router.tenancy.tenants import Tenant

logger = logging.getLogger(__name__)

SYNC_SECONDS = 0.25
HEARTBEAT_SECONDS = 5.0
"""How often a router without news tells that it is there: the others divide by it once Redis is away."""
FIRST_OUTPUT = 256.0
"""Tokens of an answer expected before a tenant had any."""
_DECAY = 0.9


class Account:
    """One tenant at this router: its bucket, and what it was served (for its turn in the queue)."""

    def __init__(self, tenant: Tenant, share: Callable[[], float], clock: Callable[[], float] = monotonic) -> None:
        self.tenant = tenant
        self.served_tokens = 0.0
        """Tokens by weight: the virtual counter of the fair queue."""
        self.unreported = 0.0
        """Used, and not told to Redis yet."""
        self.prompt_tokens = self.output_tokens = 0
        """Used since the start."""
        self.level = tenant.burst * share()
        self._share, self._clock = share, clock
        self._stamp = clock()
        self._output = FIRST_OUTPUT

    @property
    def is_limited(self) -> bool:
        return self.tenant.rate > 0

    @property
    def capacity(self) -> float:
        return self.tenant.burst * self._share()

    def set_tenant(self, tenant: Tenant) -> None:
        """The key file has a new version."""
        self.refill()
        self.level += (tenant.burst - self.tenant.burst) * self._share()
        self.tenant = tenant

    def refill(self) -> float:
        """Tokens left now; below zero where more was used than there was."""
        now = self._clock()
        self.level = min(self.capacity, self.level + (now - self._stamp) * self.tenant.rate * self._share())
        self._stamp = now
        return self.level

    def apply_shared_level(self, level: float, sent: float) -> None:
        """What all routers together have left, with `sent` of ours counted in."""
        self.unreported -= sent
        self.level, self._stamp = level - self.unreported, self._clock()

    def estimate_cost(self, prompt: int, asked: int | None, choices: int) -> float:
        """Tokens that a request will probably use: its prompt, and answers as long as this tenant's were of late."""
        each = self._output if asked is None else min(self._output, asked)
        return prompt + each * choices

    def check(self, cost: float) -> None:
        """Raises ApiError 429 unless the bucket holds `cost`, or is full: what is larger than the bucket leaves it in debt."""
        if not self.is_limited:
            return
        lacking = min(cost, self.capacity) - self.refill()
        if lacking <= 0:
            return
        seconds = max(1, math.ceil(lacking / (self.tenant.rate * self._share())))
        limit = f"{self.tenant.rate * 60:.0f} tokens a minute"
        raise ApiError(
            429,
            f"Rate limit of {limit} reached; this request needs about {cost:.0f} tokens. Try again in {seconds} s.",
            kind="tokens",
            code="rate_limit_exceeded",
            headers=[(b"retry-after", b"%d" % seconds), *self.headers()],
        )

    def use(self, tokens: float) -> None:
        """Take tokens out; fewer than none puts back what was expected and not used."""
        if self.is_limited:
            self.refill()
            self.level -= tokens
            self.unreported += tokens

    def serve(self, tokens: float) -> None:
        """Count what is done for it, or take it back: the next turn is theirs who had less."""
        self.served_tokens += tokens / self.tenant.weight

    def record_usage(self, prompt: int, output: int) -> None:
        """What a request used in the end."""
        self.prompt_tokens += prompt
        self.output_tokens += output
        self._output = _DECAY * self._output + (1 - _DECAY) * output

    def headers(self) -> Headers:
        """OpenAI's x-ratelimit-*-tokens."""
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
    """Every tenant seen. With Redis one bucket for all routers; without, each router has its share of it."""

    def __init__(self, scripts: Scripts | None, replicas: int, failures: Counter) -> None:
        """`failures`: of tasks, by name."""
        self._accounts: dict[str, Account] = {}
        self._replicas = replicas
        self._name = os.urandom(8).hex()
        self._sent: list[tuple[Account, float]] = []
        self._number = 0
        """Of the call that tells `_sent`. A call without a reply is sent again, unchanged, and charges once."""
        self._scripts, self._failures = scripts, failures
        self.is_shared = False
        """The buckets are common to all routers: Redis answered the last time."""
        self._syncing: asyncio.Task[None] | None = None

    def start(self) -> None:
        if (scripts := self._scripts) is not None:
            self._syncing = supervise("token quotas", lambda: self._follow(scripts), self._failures)

    async def close(self) -> None:
        if self._syncing is not None:
            self._syncing.cancel()
            await asyncio.gather(self._syncing, return_exceptions=True)
        if self._scripts is not None:
            await self._scripts.close()

    def usage(self) -> list[tuple[str, int, int]]:
        """Tenants with their prompt and output tokens since the start."""
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
        told = -HEARTBEAT_SECONDS
        while True:
            moving = [one for one in self._accounts.values() if one.is_limited and (one.unreported or one.refill() < one.capacity)]
            if moving or monotonic() - told >= HEARTBEAT_SECONDS:
                try:
                    await self._sync(scripts, moving)
                    told = monotonic()
                except REDIS_ERRORS as error:
                    self._fall_back(error)
                except Exception as error:  # our own fault: until it is begun again nobody tells what the others leave
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
        replicas, *levels = await scripts.call("quota", self._name, self._number, *args)
        sent, self._sent = self._sent, []
        if not self.is_shared:
            logger.info("token quotas are shared by %d routers", int(replicas))
        self.is_shared, self._replicas = True, max(1, int(replicas))
        for (account, used), level in zip(sent, levels, strict=True):
            account.apply_shared_level(float(level), used)

    def _fall_back(self, error: Exception) -> None:
        if self.is_shared:
            logger.warning(
                "token quotas: no answer from Redis (%s); this router gives each tenant 1/%d", type(error).__name__, self._replicas
            )
            for account in self._accounts.values():
                account.refill()
        self.is_shared = False


def _span(seconds: float) -> bytes:
    """As OpenAI writes it: `350ms`, `6m0s`."""
    if seconds < 1:
        return b"%dms" % round(seconds * 1000)
    minutes, rest = divmod(math.ceil(seconds), 60)
    return b"%dm%ds" % (minutes, rest) if minutes else b"%ds" % rest
