"""Charge of one request: its expected tokens at admission, corrected to the used tokens at its end."""

from fairlead_router.tenancy.quota import Account
from fairlead_router.tenancy.usage import UsageMeter


class Charge:
    """Charge to `take` at admission and to `settle` once, whatever the request's outcome. `meter` may read the answer."""

    def __init__(self, account: Account, prompt: int, output: int | None, sequences: int, paid: float = 0.0) -> None:
        """`prompt`: tokens. `output`: most tokens of each of `sequences`, None: unbounded. `paid`: tokens taken for reading the request."""
        self.account, self.paid = account, paid
        self.expected = max(paid, account.estimate_cost(prompt, output, sequences))
        self.meter = UsageMeter(prompt)

    def take(self) -> None:
        """Take the expected tokens out of the bucket."""
        self.account.use(self.expected - self.paid)

    def settle(self, computed: bool, has_usage: bool) -> float:
        """Return the used tokens less the expected ones. `computed`: a worker computed something. `has_usage`: the meter has the usage.

        Without usage, as after a client that disconnected before its answer began, the expected tokens stay charged. A request that was not
        computed has cost its reading.
        """
        used = self.expected
        if not computed:
            used = self.paid
        elif has_usage:
            used = max(self.paid, self.meter.prompt + self.meter.output)
            self.account.record_usage(self.meter.prompt, self.meter.output)
        if used != self.expected:
            self.account.use(used - self.expected)
        return used - self.expected
