"""Charge of one request: its expected tokens at admission, corrected to the used tokens at its end.

The worker reports the used tokens in a header of a complete answer, or in a comment near the end of a stream. An agent adds the prompt
tokens that its engine found in its cache, since the engine knows them at the end of a stream only.
"""

import re

from fairlead_router.tenancy.quota import Account

_COMMENT = re.compile(rb"\n: usage (\d{1,9}) (\d{1,9})(?: (\d{1,9}))?\n\n")
_HEADER = re.compile(rb"(\d{1,9}) (\d{1,9})")
TAIL = 128


class UsageMeter:
    """Observer of one answer. `prompt` and `output` are tokens, estimated if the worker's report did not arrive."""

    def __init__(self, prompt: int) -> None:
        self.prompt, self.output = prompt, 0
        self.cached: int | None = None
        """Cached tokens of the prompt, if a comment told them."""
        self.is_exact = False
        self._tail = b""

    def read_header(self, header: bytes | None) -> None:
        """Read the usage header of a complete answer."""
        if header is not None and (found := _HEADER.fullmatch(header)):
            self._set(found)

    def feed(self, piece: bytes) -> None:
        """Read a piece of a stream. Until the worker's report, each event counts as a token: JSON contains no two line breaks in a row."""
        if self.is_exact:
            return
        self._tail = self._tail[-TAIL:] + piece if len(piece) < TAIL else piece
        if (found := _COMMENT.search(self._tail, max(0, len(self._tail) - 4 * TAIL))) is not None:
            self._set(found)
            self.cached = int(found[3]) if found[3] is not None else None
        else:
            self.output += piece.count(b"\n\n")

    def _set(self, found: "re.Match[bytes]") -> None:
        self.prompt, self.output, self.is_exact = int(found[1]), int(found[2]), True


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
        """Return the used tokens less the expected ones. `computed`: a worker computed something that it does not report later.

        `has_usage`: the meter has the usage. Without it, as after a client that disconnected before an agent's answer began, the expected
        tokens stay charged. A request that was not computed has cost its reading.
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
