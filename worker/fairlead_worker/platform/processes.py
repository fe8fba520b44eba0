"""Child processes: what they have read, written and computed, from /proc, how they ended, and that they end with their parent."""

import io
import os
import resource
import shutil
import signal
import threading
from dataclasses import dataclass
from pathlib import Path

MIN_BYTES = 1 << 20
"""Bytes read or written since the last progress that count as progress: more than logging and messages make."""
MIN_CPU = 1.0
"""Seconds of CPU time since the last progress that count as progress."""
TICKS_PER_SECOND = 100.0
"""USER_HZ of /proc, the same on every Linux that Python runs on."""


@dataclass(frozen=True, slots=True)
class Work:
    """What the processes of a session have done since their start."""

    bytes: int = 0
    cpu_seconds: float = 0.0

    @classmethod
    def measure(cls, session: int) -> "Work":
        """Measure all processes of a session and their ended children. Omit processes that end meanwhile."""
        moved, ticks = 0, 0
        for path in Path("/proc").glob("[0-9]*"):
            try:
                fields = (path / "stat").read_text().rpartition(")")[2].split()
                if int(fields[3]) != session:
                    continue
                ticks += sum(int(each) for each in fields[11:15])
                counts = dict(line.split(": ") for line in (path / "io").read_text().splitlines())
                moved += int(counts["rchar"]) + int(counts["wchar"]) + int(counts["read_bytes"])
            except (OSError, ValueError, KeyError, IndexError):
                continue
        return cls(moved, ticks / TICKS_PER_SECOND)

    def moved_bytes_since(self, earlier: "Work") -> bool:
        """Return whether the bytes since `earlier` are progress. A process that ends takes its bytes with it, so they can also fall."""
        return abs(self.bytes - earlier.bytes) >= MIN_BYTES

    def computed_since(self, earlier: "Work") -> bool:
        """Return whether the CPU time since `earlier` is progress."""
        return self.cpu_seconds - earlier.cpu_seconds >= MIN_CPU


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of a process; 0 for one that has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_SECOND


def ended_cpu_seconds() -> float:
    """Return the CPU seconds of all child processes that were waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def describe_exit(what: str, status: int) -> str:
    """Return a sentence about the exit of `what`. `status` as in subprocess: minus the number of a signal that killed it."""
    if status >= 0:
        return f"{what} ended with status {status}"
    name = signal.Signals(-status).name
    hint = "; out of memory?" if -status == signal.SIGKILL else ""
    return f"{what} was ended by {name}{hint}"


def open_parent_pipe() -> io.RawIOBase:
    """Return the standard input of a process that ends with its parent. A terminal's Ctrl-C and a container's SIGTERM to all processes are
    ignored: the parent decides when this process ends.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # Unbuffered: a thread in a buffered read holds the buffer's lock, and the interpreter aborts at exit if the lock is held.
    return open(0, "rb", buffering=0, closefd=False)  # held for the process's life; a descriptor, not a path


def end_with_parent(parent_pipe: io.RawIOBase, folder: str | None = None) -> None:
    """End this process when the parent has ended, and remove `folder`, which a killed parent could not. Starts a thread."""

    def watch() -> None:
        while parent_pipe.read(4096):
            pass
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=watch, name="parent watch", daemon=True).start()
