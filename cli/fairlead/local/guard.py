"""Kill the processes of a run after the run itself has ended for any reason, including `kill -9`.

It is a separate process: `python guard.py` reads lines from standard input, `+PGID` for a started process group and `-PGID` for an ended
one. End of file means that the writer has ended: every remaining group gets SIGTERM, then SIGKILL. A pipe is reliable and PDEATHSIG is
not: that signal depends on one thread of the parent, is not inherited by grandchildren, and exists on Linux only.
"""

import contextlib
import os
import signal
import sys
import time

GRACE_SECONDS = 2.0


def main() -> None:
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    groups: set[int] = set()
    for line in sys.stdin:
        kind, value = line[0], line[1:].rstrip("\n")
        if kind == "+":
            groups.add(int(value))
        elif kind == "-":
            groups.discard(int(value))
    end_groups(groups)


def end_groups(groups: set[int]) -> None:
    """Send SIGTERM to all groups, and SIGKILL after `GRACE_SECONDS` for all of them together."""
    signal_groups(groups, signal.SIGTERM)
    deadline = time.monotonic() + GRACE_SECONDS
    while any(is_alive(group) for group in groups) and time.monotonic() < deadline:
        time.sleep(0.05)
    signal_groups(groups, signal.SIGKILL)


def signal_groups(groups: set[int], number: signal.Signals) -> None:
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, number)


def is_alive(group: int) -> bool:
    """Return whether any process of the group exists, including zombies that their parent has not reaped yet."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


if __name__ == "__main__":
    main()
