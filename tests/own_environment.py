"""A virtual environment in the user's cache, for packages that conflict with the project's own pins."""

import fcntl
import hashlib
import os
import subprocess
import sys
from pathlib import Path


class OwnEnvironment:
    """The environment of one requirements file: other pins make another environment, so an existing one never changes."""

    def __init__(self, name: str, pins: Path, *flags: str) -> None:
        """`flags`: more of `uv pip install`, such as --no-deps."""
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fairlead" / name
        self.pins, self.flags = pins, flags
        self.folder = root / hashlib.sha256(pins.read_bytes() + sys.version.encode()).hexdigest()[:10]
        self.python = self.folder / "bin" / "python"

    def install(self, seconds: float = 600) -> str:
        """Return an empty string if it exists now, otherwise the reason. At most `seconds` for each of two commands."""
        made = self.folder / "made"
        if made.exists():
            return ""
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        uv = Path(sys.executable).with_name("uv")
        with self.folder.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # two checkouts may create it concurrently
            if made.exists():
                return ""
            try:
                for command in (
                    ["venv", "--quiet", "--clear", "--python", sys.executable, self.folder],
                    ["pip", "install", "--quiet", "--compile-bytecode", "--python", self.python, *self.flags, "-r", self.pins],
                ):
                    subprocess.run([uv, *command], check=True, timeout=seconds, capture_output=True, text=True)
            except subprocess.CalledProcessError as error:
                return error.stderr.strip()[-300:]
            except (OSError, subprocess.TimeoutExpired) as error:
                return str(error)
            made.touch()
        return ""
