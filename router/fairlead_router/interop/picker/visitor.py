"""Who a gateway's request comes from, and what that tenant is charged for it: the same keys, buckets and salts as the proxy's."""

from fairlead_router.errors import Headers
from fairlead_router.request.prompts import Prompt
from fairlead_router.tenancy.quota import Account
from fairlead_router.tenancy.tenants import ANYONE, Caller
from fairlead_router.tenancy.usage import Meter


class Visitor:
    """One request's caller. What it will probably use is taken out at once; what it did use is made good at its end."""

    def __init__(self, caller: Caller = ANYONE, account: Account | None = None) -> None:
        self.caller = caller
        self._account = account
        self._expected = 0.0
        self._meter: Meter | None = None
        self._status = 0
        self._read = False

    def charge(self, prompt: Prompt) -> None:
        """Raises ApiError 429 where the tenant's bucket does not hold it."""
        if self._account is None:
            return
        expected = self._account.expect(prompt.length, prompt.asked.output, prompt.asked.sequences)
        self._account.admit(expected)
        self._account.use(expected)
        self._expected, self._meter = expected, Meter(prompt.length)

    def instructions(self, prompt: Prompt) -> list[tuple[str, str]]:
        """Headers for the worker, which no client can send through us."""
        said = [("x-fairlead-cache-salt", prompt.salt)] if prompt.salt else []
        if self.caller.tenant.name:
            said.append(("x-fairlead-tenant", self.caller.tenant.name))
            said.append(("x-fairlead-priority", str(self.caller.bounded(prompt.asked.priority))))
            if prompt.asked.stream:
                said.append(("x-fairlead-usage", "1"))
        return said

    def began(self, status: int, headers: Headers) -> None:
        self._status = status
        if self._meter is not None:
            self._meter.head(dict(headers).get(b"x-fairlead-usage"))

    def read(self, piece: bytes) -> None:
        """A piece of the answer, where the gateway shows it."""
        self._read = True
        if self._meter is not None:
            self._meter.feed(piece)

    def settle(self) -> None:
        """Nothing is charged for a refusal. Where the answer was not shown, what was expected stays."""
        if self._account is None or not self._expected:
            return
        if self._status >= 400:
            self._account.use(-self._expected)
        elif self._meter is not None and (self._meter.known or self._read):
            self._account.use(self._meter.prompt + self._meter.output - self._expected)
            self._account.learn(self._meter.prompt, self._meter.output)
        self._expected = 0.0
