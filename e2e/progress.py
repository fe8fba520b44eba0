"""Progress of long steps: a line when a step begins, one when it ends, and one every 30 seconds in between.

`python e2e/progress.py WHAT -- COMMAND...` runs a command as one step. This file needs only the standard library.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

INTERVAL = 30.0
"""Seconds between two lines of a running step."""
_STARTED = time.monotonic()
_lock = threading.Lock()
_running: list[object] = []
"""Steps that run now, the innermost last. Only that one prints while it runs."""
_descriptor = 2


def write_to(descriptor: int) -> None:
    """Print to this file descriptor from now on, such as the standard error that pytest does not capture."""
    global _descriptor
    _descriptor = descriptor


def say(text: str) -> None:
    """Print `text` after the time since this program started, in minutes and seconds."""
    minutes, seconds = divmod(int(time.monotonic() - _STARTED), 60)
    try:
        os.write(_descriptor, f"[{minutes:3}:{seconds:02}] {text}\n".encode())
    except OSError:  # nothing reads the output any more: the step itself goes on
        pass


@contextmanager
def step(what: str, interval: float = INTERVAL, ending: str = "done in") -> Iterator[None]:
    """Print when the block begins and ends, and every `interval` seconds while it is the innermost step.

    `ending`: the words before the seconds, where the block raises nothing.
    """
    began, token, over = time.monotonic(), object(), threading.Event()

    def report() -> None:
        while not over.wait(interval):
            with _lock:
                innermost = _running[-1] is token
            if innermost:
                say(f"{what}: running for {time.monotonic() - began:.0f} s")

    say(f"{what} ...")
    with _lock:
        _running.append(token)
    reporter = threading.Thread(target=report, name=f"progress of {what}", daemon=True)
    reporter.start()
    try:
        yield
    except BaseException:
        ending = "failed after"
        raise
    finally:
        over.set()
        with _lock:
            _running.remove(token)
        say(f"{what}: {ending} {time.monotonic() - began:.0f} s")


def main() -> int:
    """Run the command of the command line as one step. Return its exit status."""
    what, dashes, *command = sys.argv[1:]
    if dashes != "--" or not command:
        print("usage: python e2e/progress.py WHAT -- COMMAND...", file=sys.stderr)
        return 2
    try:
        with step(what):
            subprocess.run(command, check=True)
    except subprocess.CalledProcessError as error:
        return error.returncode if error.returncode > 0 else 128 - error.returncode
    return 0


if __name__ == "__main__":
    sys.exit(main())
