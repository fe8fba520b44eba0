"""What the clients' suites know of what they talk to. Imports nothing of the project's: some run in an environment of their own."""

from dataclasses import dataclass

import httpx

MODEL = "tiny"
"""The name that it is served by."""
KEY, POOR_KEY = "fl-a-key-which-is-random-in-life", "fl-the-key-of-who-has-no-tokens-left"
"""Of the guarded router: a tenant without bounds, and one that may use a single token a minute."""


@dataclass(frozen=True)
class Endpoints:
    """Where everything answers: URLs without a path."""

    worker: str
    router: str
    """No keys, the index in use."""
    guarded: str
    """A router that asks for `KEY` or `POOR_KEY`."""
    forsaken: str
    """A router whose only worker does not exist."""

    def running(self) -> int:
        """Sequences in the engine."""
        load = httpx.get(f"{self.worker}/load").json()
        return int(load["running"]) + int(load["waiting"])
