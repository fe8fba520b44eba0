"""What a GPU machine without a package index needs beside the tree, torch and transformers: `make gpu-bundle` here, `--bundle` there.

FlashInfer's wheel is 60 MB, most of it sources of kernels that are not used here; without those, and packed by xz, 17 MB.
"""

import argparse
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from bench.common.report import ROOT, revision

FLASHINFER = "flashinfer-python==0.7.2.post1"
BESIDE = ("apache-tvm-ffi>=0.1.11,<0.2", "einops", "tabulate", "nvidia-ml-py")
"""What FlashInfer imports: its other requirements are for kernels that are not used."""
WORKER = (
    *("annotated-doc", "annotated-types", "anyio", "certifi", "click", "fastapi", "h11", "hiredis", "httpcore", "httptools", "httpx"),
    *(
        "idna",
        "llguidance",
        "msgspec",
        "obstore",
        "opentelemetry-api",
        "prometheus-client",
        "pydantic",
        "pydantic-core",
        "pydantic-settings",
        "python-dotenv",
    ),
    *("pyzmq", "redis", "starlette", "typing-extensions", "typing-inspection", "uvicorn", "uvloop", "xxhash"),
)
"""Of the worker's requirements, all but what comes with torch and transformers; those without a pin are left out."""
QUANTIZED = ("accelerate", "compressed-tensors", "loguru", "psutil", "torchao")
"""What reads and makes weights of fewer bits, and what those import that is not above."""
PLATFORM = ("--python-version", "3.12", "--implementation", "cp", "--only-binary", ":all:")
SYSTEMS = (*(f"manylinux_2_{minor}_x86_64" for minor in (39, 35, 34, 31, 28, 27, 24, 17)), "manylinux2014_x86_64", "manylinux1_x86_64")
HEADERS = r"include/|cccl/|spdlog/|cutlass/include/|cutlass/tools/util/include/"
USED = re.compile(rf"flashinfer/data/({HEADERS}|csrc/[^/]+$|[^/]+$)|(?!flashinfer/data/)")
"""Of the wheel: Python, headers, and the kernels' sources that lie in no folder of their own."""


def make(folder: Path) -> None:
    """Fill `folder`; what is there already is kept."""
    wheels, archive = folder / "wheels", folder / "flashinfer.tar.xz"
    wheels.mkdir(parents=True, exist_ok=True)
    missing = [name for name in [*pins(), *BESIDE] if not list(wheels.glob(f"{re.split('[=<>]', name)[0].replace('-', '_')}-*.whl"))]
    if missing:
        print(f"== downloading {len(missing)} small wheels", flush=True)
        download(wheels, missing)
    if not archive.is_file():
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            print(f"== downloading {FLASHINFER} (60 MB)", flush=True)
            download(Path(scratch), [FLASHINFER])
            (wheel,) = Path(scratch).glob("*.whl")
            print("== packing what is used of it (a minute or two)", flush=True)
            repack(wheel, archive)
    (folder / "commit").write_text(revision() + "\n")
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    print(f"{folder}: {size / 2**20:.1f} MiB", flush=True)


def pins() -> list[str]:
    """`name==version` of the worker's requirements, and of those on GPUs."""
    return [*_pinned("worker.txt", WORKER), *_pinned("worker-gpu.txt", QUANTIZED)]


def _pinned(file: str, names: Sequence[str]) -> list[str]:
    known = dict(re.findall(r"^([a-z0-9-]+)==([^ ;\\]+)", (ROOT / "requirements" / file).read_text(), re.M))
    return [f"{name}=={known[name]}" for name in names if name in known]


def download(folder: Path, names: list[str]) -> None:
    systems = [part for system in SYSTEMS for part in ("--platform", system)]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), *PLATFORM, *systems, *names]
    subprocess.run(command, check=True)


def repack(wheel: Path, archive: Path) -> None:
    """The used part of `wheel` as a tar.xz, whole or not at all."""
    fresh = archive.with_suffix(".tmp")
    # The fastest level: a fifth larger than the usual one, in a fifth of the time.
    with zipfile.ZipFile(wheel) as source, tarfile.open(fresh, "w:xz", preset=1) as target:
        for member in source.infolist():
            if member.is_dir() or not USED.match(member.filename):
                continue
            entry = tarfile.TarInfo(member.filename)
            entry.size, entry.mode = member.file_size, 0o644
            with source.open(member) as content:
                target.addfile(entry, content)
    fresh.rename(archive)


def unpack(folder: Path) -> str:
    """On the GPU machine: install what is missing there next to the bundle; the PYTHONPATH to go on with."""
    site = Path(tempfile.mkdtemp(prefix="gpu-check-site-"))
    wheels = [str(path) for path in sorted((folder / "wheels").glob("*.whl")) if not present(path.name)]
    if wheels:
        options = ["--quiet", "--no-index", "--no-deps", "--no-compile", "--no-cache-dir", "--target", str(site)]
        subprocess.run([sys.executable, "-m", "pip", "install", *options, *wheels], check=True)
    if not present("flashinfer_python-0"):
        with tarfile.open(folder / "flashinfer.tar.xz") as archive:
            archive.extractall(site, filter="data")
    packages = [str(ROOT / folder) for folder in ("common", "index", "worker", "router", "operator", "cli")]
    # As images have it: else each start compiles a thousand modules, where the environment forbids to keep what is compiled.
    subprocess.run([sys.executable, "-m", "compileall", "-q", "-j", "0", str(site), *packages], check=False, stdout=subprocess.DEVNULL)
    return ":".join([*packages, str(ROOT), str(site)])


def present(wheel: str) -> bool:
    """Whether what a wheel holds is installed here, in some version."""
    import importlib.metadata

    try:
        importlib.metadata.distribution(wheel.partition("-")[0].replace("_", "-"))
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="gpu-bundle", description=__doc__)
    parser.add_argument("folder", type=Path, help="where it is made, and kept for the next time")
    make(parser.parse_args().folder)
