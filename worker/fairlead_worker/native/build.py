"""Build of the native library: `python -m fairlead_worker.native.build`, run by `make install` and the worker image. It takes seconds
and needs gcc.

Sources with vector code are compiled for each CPU level of the machine type (`fairlead_worker.platform.isa`), all into one library.
Compiling needs no CPU of these levels. On other machines the engine uses torch.
"""

import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

HERE = Path(__file__).parent
SOURCES = HERE / "src"
LIBRARY = HERE / "libfairlead.so"
STAMP = HERE / "libfairlead.key"
FLAGS = (
    "-std=c11", "-O3", "-fPIC", "-fopenmp", "-fvisibility=hidden", "-fno-math-errno", "-Wall", "-Wextra", "-Werror",
)  # fmt: skip
"""-ffast-math is not used: NaN and infinity must keep their meaning."""
AVX2 = ("-march=x86-64-v3",)
AVX512 = ("-march=x86-64-v4", "-mprefer-vector-width=512")
MACHINES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "x86_64": {"avx2": AVX2, "avx512": AVX512, "avx512_bf16": (*AVX512, "-mavx512bf16", "-mavx512vnni")},
    "aarch64": {"neon": ("-march=armv8-a",), "neon_bf16": ("-march=armv8.2-a+bf16+dotprod",)},
}
"""Flags of each level, the lowest first. `amx` is `avx512_bf16` with the products of `amx.c`."""
LEVELS = MACHINES.get(platform.machine(), {})
VECTORS = ("attention", "decoder", "elementwise", "gemm", "pack", "round", "tile", "tile_blocks")
"""Sources that are compiled for each level; the others gain nothing from vectors."""
X86_ALONE = ("amx",)

logger = logging.getLogger(__name__)


def key() -> str:
    """Return a hash of sources and flags."""
    parts = [path.name.encode() + path.read_bytes() for path in sorted(SOURCES.iterdir())]
    return hashlib.sha256(b"\0".join([*parts, " ".join((*FLAGS, *VECTORS, str(LEVELS))).encode()])).hexdigest()[:16]


def current() -> bool:
    """Return whether the library exists and was built from these sources."""
    return LIBRARY.exists() and STAMP.exists() and STAMP.read_text() == key()


def build() -> bool:
    """Compile the library unless it is current. Returns False, with a warning, if there is no compiler or it fails."""
    if not LEVELS:
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
    if problem := compile_library(compiler, LEVELS, partial):
        logger.warning("%s failed: the engine runs on torch alone, and slower\n%s", compiler, problem)
        return False
    partial.rename(LIBRARY)
    STAMP.write_text(key())
    return True


def compile_library(compiler: str, levels: Mapping[str, Sequence[str]], library: Path) -> str:
    """Compile `library` for each of `levels` (the lowest first, with its flags). Returns the error; empty on success."""
    running: dict[str, subprocess.Popen[str]] = {}
    logger.info("compiling the native library for %s with %s: up to a minute", ", ".join(levels), compiler)
    with tempfile.TemporaryDirectory() as folder:
        for command, into in _compilations(compiler, levels, Path(folder)):
            running[into.name] = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, cwd=into)
        # Linking is a separate command: with -fopenmp it would add libgomp, see team.h.
        problems = []
        for number, (group, process) in enumerate(running.items(), start=1):
            problems.append(process.communicate()[1].strip())
            logger.info("%d of %d: %s %s", number, len(running), group, "failed" if process.returncode else "compiled")
        if not any(process.returncode for process in running.values()):
            objects = [str(path) for path in sorted(Path(folder).glob("*/*.o"))]
            linked = subprocess.run([compiler, "-shared", *objects, "-lm", "-o", str(library)], capture_output=True, text=True)
            problems = [linked.stderr.strip() or "the linker failed"] if linked.returncode else []
    return "\n".join(filter(None, problems))


def _compilations(compiler: str, levels: Mapping[str, Sequence[str]], folder: Path) -> Iterator[tuple[list[str], Path]]:
    """Yield the commands that compile all objects, each with its working folder. They are independent of each other."""
    sources = [path for path in sorted(SOURCES.glob("*.c")) if "avx2" in levels or path.stem not in X86_ALONE]
    groups = {"base": next(iter(levels.values()))} | {level: (*flags, f"-DLEVEL={level}") for level, flags in levels.items()}
    for name, flags in groups.items():
        (into := folder / name).mkdir()
        chosen = [str(path) for path in sources if (path.stem in VECTORS) == (name in levels)]
        yield [compiler, *FLAGS, *flags, "-c", *chosen], into


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    sys.exit(0 if build() else 1)
