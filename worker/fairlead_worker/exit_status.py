"""How a process ended, in words."""

import signal


def describe_exit(what: str, status: int) -> str:
    """`status` as subprocess gives it: negative for a signal."""
    if status >= 0:
        return f"{what} ended with status {status}"
    name = signal.Signals(-status).name
    hint = "; out of memory?" if -status == signal.SIGKILL else ""
    return f"{what} was ended by {name}{hint}"
