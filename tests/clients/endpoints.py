"""Constants and addresses for the clients' suites. Imports nothing of the project: some suites run in their own environment."""

from dataclasses import dataclass

import httpx

MODEL = "tiny"
"""The served model name."""
KEY, POOR_KEY = "fl-a-key-which-is-random-in-life", "fl-the-key-of-who-has-no-tokens-left"
"""Keys of the guarded router: a tenant without limits, and one that may use a single token per minute."""


@dataclass(frozen=True)
class Endpoints:
    """The servers' URLs, without a path."""

    worker: str
    router: str
    """The router without keys, which uses the index."""
    guarded: str
    """The router that requires `KEY` or `POOR_KEY`."""
    forsaken: str
    """A router whose only worker does not exist."""

    def running(self) -> int:
        """Return the number of sequences in the engine."""
        load = httpx.get(f"{self.worker}/load").json()
        return int(load["running"]) + int(load["waiting"])
