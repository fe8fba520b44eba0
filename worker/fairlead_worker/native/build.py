"""Compile the library: `python -m fairlead_worker.native.build`, as `make install` and the worker image do. Takes seconds, and gcc.

The kernels are for x86-64 with AVX512 and its bfloat16 products (Zen 4, Sapphire Rapids and later; compiling needs no such machine).
Elsewhere `library.native` finds no library that it could run, and the engine stays on torch.
"""

import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
SOURCES = HERE / "src"
LIBRARY = HERE / "libfairlead.so"
STAMP = HERE / "libfairlead.key"
FLAGS = (
    "-std=c11", "-O3", "-fPIC", "-fopenmp", "-fvisibility=hidden", "-fno-math-errno", "-Wall", "-Wextra", "-Werror",
    "-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni", "-mprefer-vector-width=512",
)  # fmt: skip
"""No -ffast-math: NaN and infinity mean what they say."""

logger = logging.getLogger(__name__)


def key() -> str:
    """What the library is made of: sources and flags."""
    parts = [path.name.encode() + path.read_bytes() for path in sorted(SOURCES.iterdir())]
    return hashlib.sha256(b"\0".join([*parts, " ".join(FLAGS).encode()])).hexdigest()[:16]


def current() -> bool:
    """Whether the library is there and made of these very sources."""
    return LIBRARY.exists() and STAMP.exists() and STAMP.read_text() == key()


def build() -> bool:
    """Compile unless the library is there already; False, with a warning, where there is no compiler or it fails."""
    if platform.machine() != "x86_64":
        logger.warning("no native kernels for %s: the engine runs on torch alone", platform.machine())
        return False
    if current():
        return True
    if not os.access(HERE, os.W_OK):
        logger.warning("%s may not be written: the engine runs on torch alone; build as the owner of the installation", HERE)
        return False
    compiler = next((path for name in ("cc", "gcc", "clang") if (path := shutil.which(name))), None)
    if compiler is None:
        logger.warning("no C compiler (cc, gcc or clang): the engine runs on torch alone, and slower; install gcc")
        return False
    partial = LIBRARY.with_suffix(f".{os.getpid()}")
    with tempfile.TemporaryDirectory() as folder:
        sources = [str(path) for path in sorted(SOURCES.glob("*.c"))]
        # Two commands, for linking with -fopenmp would bring libgomp along: see team.h.
        objects = [str(Path(folder, Path(source).with_suffix(".o").name)) for source in sources]
        for command in ([compiler, *FLAGS, "-c", *sources], [compiler, "-shared", *objects, "-lm", "-o", str(partial)]):
            made = subprocess.run(command, capture_output=True, text=True, cwd=folder)
            if made.returncode:
                logger.warning("%s failed: the engine runs on torch alone, and slower\n%s", compiler, made.stderr.strip())
                return False
    partial.rename(LIBRARY)
    STAMP.write_text(key())
    return True


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    sys.exit(0 if build() else 1)
