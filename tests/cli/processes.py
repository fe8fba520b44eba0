"""Find processes by a variable in their environment, whoever started them and whatever their parent is now."""

import time
from pathlib import Path


def find_marked(mark: str) -> list[int]:
    """Return the processes whose environment has MARK=mark."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if f"MARK={mark}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def wait_until_gone(mark: str, seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while left := find_marked(mark):
        assert time.monotonic() < deadline, f"left running: {[_words(pid) for pid in left]}"
        time.sleep(0.05)


def _words(pid: int) -> str:
    try:
        return f"{pid} " + Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return str(pid)
