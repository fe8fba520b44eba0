"""Charge of one request: its expected tokens at admission, corrected to the used tokens at its end."""

from fairlead_router.tenancy.quota import Account
from fairlead_router.tenancy.usage import UsageMeter


class Charge:
    """Charge to `take` at admission and to `settle` once, whatever the request's outcome. `meter` may read the answer."""

    def __init__(self, account: Account, prompt: int, output: int | None, sequences: int) -> None:
        """`prompt`: tokens. `output`: most tokens of each of `sequences`, None: unbounded."""
        self.account = account
        self.expected = account.estimate_cost(prompt, output, sequences)
        self.meter = UsageMeter(prompt)

    def take(self) -> None:
        """Take the expected tokens out of the bucket."""
        self.account.use(self.expected)

    def settle(self, computed: bool, has_usage: bool) -> float:
        """Return the used tokens less the expected ones. `computed`: a worker computed something. `has_usage`: the meter has the usage.

        Without usage, as after a client that disconnected before its answer began, the expected tokens stay charged.
        """
        used = self.expected
        if not computed:
            used = 0.0
        elif has_usage:
            used = self.meter.prompt + self.meter.output
            self.account.record_usage(self.meter.prompt, self.meter.output)
        if used != self.expected:
            self.account.use(used - self.expected)
        return used - self.expected
