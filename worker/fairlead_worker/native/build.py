"""Compile the library: `python -m fairlead_worker.native.build`, as `make install` and the worker image do. Takes seconds, and gcc.

The sources with vectors are compiled for each CPU level of x86-64 (`fairlead_worker.isa`), and one library holds all of them; compiling
needs no such machine. On other CPUs the engine stays on torch.
"""

import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
SOURCES = HERE / "src"
LIBRARY = HERE / "libfairlead.so"
STAMP = HERE / "libfairlead.key"
FLAGS = (
    "-std=c11", "-O3", "-fPIC", "-fopenmp", "-fvisibility=hidden", "-fno-math-errno", "-Wall", "-Wextra", "-Werror",
)  # fmt: skip
"""No -ffast-math: NaN and infinity mean what they say."""
BASE = ("-march=x86-64-v3",)
AVX512 = ("-march=x86-64-v4", "-mprefer-vector-width=512")
LEVELS = {"avx2": BASE, "avx512": AVX512, "avx512_bf16": (*AVX512, "-mavx512bf16", "-mavx512vnni")}
"""Flags of each level. `amx` is `avx512_bf16` with the products of `amx.c`."""
VECTORS = ("attention", "decoder", "elementwise", "gemm", "tile")
"""Sources that are compiled for each level; the others have no vectors worth it."""

logger = logging.getLogger(__name__)


def key() -> str:
    """What the library is made of: sources and flags."""
    parts = [path.name.encode() + path.read_bytes() for path in sorted(SOURCES.iterdir())]
    return hashlib.sha256(b"\0".join([*parts, " ".join((*FLAGS, *VECTORS, str(LEVELS))).encode()])).hexdigest()[:16]


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
    running: list[subprocess.Popen[str]] = []
    with tempfile.TemporaryDirectory() as folder:
        for command, sources in _compilations(compiler, Path(folder)):
            running.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, cwd=sources))
        # Linking is a command of its own, for with -fopenmp it would bring libgomp along: see team.h.
        problems = [process.communicate()[1].strip() for process in running]
        if not any(process.returncode for process in running):
            objects = [str(path) for path in sorted(Path(folder).glob("*/*.o"))]
            linked = subprocess.run([compiler, "-shared", *objects, "-lm", "-o", str(partial)], capture_output=True, text=True)
            if not linked.returncode:
                partial.rename(LIBRARY)
                STAMP.write_text(key())
                return True
            problems = [linked.stderr.strip()]
    logger.warning("%s failed: the engine runs on torch alone, and slower\n%s", compiler, "\n".join(filter(None, problems)))
    return False


def _compilations(compiler: str, folder: Path) -> Iterator[tuple[list[str], Path]]:
    """Yield the commands that make every object, each with the folder it runs in. They are independent of each other."""
    sources = sorted(SOURCES.glob("*.c"))
    groups = {"base": (*BASE,)} | {level: (*flags, f"-DLEVEL={level}") for level, flags in LEVELS.items()}
    for name, flags in groups.items():
        (into := folder / name).mkdir()
        chosen = [str(path) for path in sources if (path.stem in VECTORS) == (name in LEVELS)]
        yield [compiler, *FLAGS, *flags, "-c", *chosen], into


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    sys.exit(0 if build() else 1)
