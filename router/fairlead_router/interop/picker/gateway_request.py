"""Caller and charge of a gateway's request, with the same API keys, token buckets and salts as the proxy's."""

from time import monotonic

from fairlead_router.errors import Headers
from fairlead_router.request.price import FORWARDED_PRICE, LEFT_PRICE, price_of_report
from fairlead_router.service_classes import ServiceClass
from fairlead_router.tenancy.body_budget import InflightBodyBudget
from fairlead_router.tenancy.charge import Charge
from fairlead_router.tenancy.quota import Account
from fairlead_router.tenancy.tenants import Caller


class GatewayRequest:
    """One request's caller, its charge, and the usage read from its answer."""

    def __init__(self, caller: Caller, account: Account, bodies: InflightBodyBudget, service_class: ServiceClass | None = None) -> None:
        self.caller, self.account, self._body_budget, self.service_class = caller, account, bodies, service_class
        self.arrived_at = monotonic()
        self._reserved_bytes = 0
        self.charge: Charge | None = None
        """None until a worker is picked, and for paths without a charge."""
        self.is_reported = False
        """The picked worker reports what it has computed if the client leaves before an answer. An agent does not."""
        self._status = 0
        self._has_read_body = False

    def reserve_body(self, size: int) -> None:
        """Reserve `size` more bytes for the body. Raises ApiError when the body budget is exhausted."""
        self._body_budget.acquire(self.caller.tenant.name, size)
        self._reserved_bytes += size

    def release_body(self) -> None:
        """Release the body's bytes. Idempotent."""
        if self._reserved_bytes:
            self._body_budget.release(self.caller.tenant.name, self._reserved_bytes)
            self._reserved_bytes = 0

    def read_head(self, status: int, headers: Headers) -> None:
        self._status = status
        self.account.use(price_of_report(dict(headers).get(b"x-fairlead-cpu-ms")))
        if self.charge is not None:
            self.charge.meter.read_header(dict(headers).get(b"x-fairlead-usage"))

    def read_body(self, piece: bytes) -> None:
        """Read a piece of the answer, if the gateway sends it."""
        self._has_read_body = True
        if self.charge is not None:
            self.charge.meter.feed(piece)

    def settle(self) -> None:
        """Settle the charge; a refused request has cost its reading, and one that a worker refused its forwarding. Idempotent."""
        charge, self.charge = self.charge, None
        if charge is not None:
            is_left = not self._status and not self._has_read_body
            if is_left:
                self.account.use(LEFT_PRICE)
            if 400 <= self._status < 500 and self._status != 429:
                self.account.use(FORWARDED_PRICE)
            computed = self._status < 400 and not (is_left and self.is_reported)
            charge.settle(computed, charge.meter.is_exact or self._has_read_body)
