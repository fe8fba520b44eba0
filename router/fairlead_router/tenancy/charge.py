"""What one request is charged: what it will probably use at once, and in the end what it did use."""

from fairlead_router.tenancy.quota import Account
from fairlead_router.tenancy.usage import UsageMeter


class Charge:
    """`take` it, then `settle` it once, however the request ended. `meter` reads the answer where the caller lets it."""

    def __init__(self, account: Account, prompt: int, output: int | None, sequences: int) -> None:
        """`prompt`: tokens; `output`: at most, of each of `sequences`; None for no bound."""
        self.account = account
        self.expected = account.estimate_cost(prompt, output, sequences)
        self.meter = UsageMeter(prompt)

    def take(self) -> None:
        """What is expected leaves the bucket."""
        self.account.use(self.expected)

    def settle(self, computed: bool, told: bool) -> float:
        """Give the tokens that it used beyond what was expected. `computed`: a worker did something for it; `told`: the meter knows what.

        Where it does not, as after a client that went before its answer began, what was expected stays.
        """
        used = self.expected
        if not computed:
            used = 0.0
        elif told:
            used = self.meter.prompt + self.meter.output
            self.account.record_usage(self.meter.prompt, self.meter.output)
        if used != self.expected:
            self.account.use(used - self.expected)
        return used - self.expected
