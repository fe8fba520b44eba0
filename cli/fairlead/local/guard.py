"""Kills what a run started when the run itself is gone, however it went (also `kill -9`).

Run as a process of its own: `python guard.py` reads lines from standard input, `+PGID` for a process group that began and
`-PGID` for one that ended. The end of the input means that the writer is dead: every group still listed is
asked to stop, then killed. A pipe's end is certain where PDEATHSIG is not: that signal is bound to one thread of the parent, is not
inherited by grandchildren, and exists on Linux only.
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
    """SIGTERM to all, `GRACE_SECONDS` for them together, then SIGKILL."""
    signal_groups(groups, signal.SIGTERM)
    deadline = time.monotonic() + GRACE_SECONDS
    while any(alive(group) for group in groups) and time.monotonic() < deadline:
        time.sleep(0.05)
    signal_groups(groups, signal.SIGKILL)


def signal_groups(groups: set[int], number: signal.Signals) -> None:
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, number)


def alive(group: int) -> bool:
    """Whether any process of the group is left (a zombie counts: its parent has not looked yet)."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


if __name__ == "__main__":
    main()
