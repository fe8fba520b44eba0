"""Describes how a process ended."""

import signal


def describe_exit(what: str, status: int) -> str:
    """Describe the exit of `what`. `status` is subprocess's: negative for a signal."""
    if status >= 0:
        return f"{what} ended with status {status}"
    name = signal.Signals(-status).name
    hint = "; out of memory?" if -status == signal.SIGKILL else ""
    return f"{what} was ended by {name}{hint}"
