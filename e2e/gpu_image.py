"""Run the steps of images/Containerfile.worker-gpu on the base of the other images, as CUDA's base images need a registry and gigabytes.

The steps and the copied files are those of the Containerfile. What differs: nvcc comes from wheels and torch from this Python's packages,
both mounted while a step runs; of the pins only those of FlashInfer and Triton are installed; and one kernel module is compiled.
"""

import re
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from tests.own_environment import OwnEnvironment

from e2e.cluster import images
from e2e.cluster.paths import CHECKOUT

CONTAINERFILE = CHECKOUT / "images" / "Containerfile.worker-gpu"
PINS = "requirements/worker-gpu.txt"
INSTALLED = ("apache-tvm-ffi", "einops", "flashinfer-python", "ninja", "nvidia-ml-py", "tabulate", "triton")
"""Triton is written to: its driver is compiled."""
MODULE = "silu_and_mul"
BASES = re.compile(r"^FROM docker\.io/nvidia/cuda:\$\{CUDA\}-\w+-ubuntu24\.04", re.MULTILINE)
SITE, LINKS = "/opt/site", "/opt/links"
"""Where this Python's packages are mounted, and links to all but what the image's environment has itself. Both are Python 3.11."""
PACKAGES = "/opt/fairlead/lib/python3.11/site-packages"
"""Of the image's own environment."""
CHECKS = f"""
RUN test -x /opt/fairlead/bin/fairlead-worker && python3 -c "import fairlead_worker.kernels.flashinfer"
RUN FLASHINFER_CUDA_ARCH_LIST=9.0a python3 -c "from flashinfer.jit.activation import gen_act_and_mul_module; \
    assert gen_act_and_mul_module('silu').is_aot, 'FlashInfer does not find the compiled {MODULE}'"
"""


def text(source: str) -> str:
    """Return the Containerfile `source` on the base BASE."""
    changed, count = BASES.subn("FROM ${BASE}", source)
    if count != 3:
        raise images.ImageFailed(f"{CONTAINERFILE} has {count} stages on a CUDA image instead of 3: adapt e2e/gpu_image.py")
    return f"ARG BASE\n{changed}{CHECKS}"


def sources(source: str) -> list[str]:
    """Return what the Containerfile `source` copies from the checkout."""
    lines = source.replace("\\\n", " ").splitlines()
    copies = [line.split()[1:-1] for line in lines if line.startswith("COPY ") and "--from=" not in line]
    return sorted({path for paths in copies for path in paths})


def build(source: str) -> None:
    """Run the steps of the Containerfile `source`. Raises ImageFailed with the output of the step that fails."""
    environment = OwnEnvironment("gpu-kernels", CHECKOUT / "requirements" / "gpu-kernels.txt", "--no-deps")
    if problem := environment.install():
        raise images.ImageFailed(f"nvcc cannot be installed: {problem}")
    with tempfile.TemporaryDirectory() as folder:
        torch, links, pins = (Path(folder, name) for name in ("torch.pth", "links", "pins.txt"))
        torch.write_text(f"{LINKS}\n")
        packages = Path(sysconfig.get_path("purelib"))
        links.mkdir()
        for entry in packages.iterdir():
            if not entry.name.startswith(("pip", "fairlead", "triton")):
                (links / entry.name).symlink_to(f"{SITE}/{entry.name}")
        cuda = next(environment.folder.glob("lib/python*/site-packages/nvidia/cu13"))
        add_link_names(cuda)
        pins.write_text(select_pins((CHECKOUT / PINS).read_text()))
        files = {path: CHECKOUT / path for path in sources(source)} | {PINS: pins}
        mounts = {cuda: "/usr/local/cuda", packages: SITE, links: LINKS, torch: f"{PACKAGES}/torch.pth"}
        arguments = {"ARCHES": "9.0a", "HEAD_DIMS": f"64 --modules {MODULE}"}
        images.build_steps("fairlead-gpu-steps", text(source), files, mounts, arguments, env="PIP_NO_DEPS=1", stage="kernels")


def select_pins(pins: str) -> str:
    """Return the entries of INSTALLED, each with its hashes."""
    entries = re.findall(rf"^(?:{'|'.join(INSTALLED)})==.*\n(?: +--hash=.*\n)+", pins, re.MULTILINE)
    assert len(entries) == len(INSTALLED), entries
    return "".join(entries)


def add_link_names(cuda: Path) -> None:
    """Add the names that the linker looks for in CUDA's images, and the driver's stub: the driver's library itself is on the node."""
    stub = cuda / "lib64" / "stubs" / "libcuda.so"
    if stub.exists():
        return
    stub.parent.mkdir(parents=True, exist_ok=True)
    (cuda / "lib64" / "libcudart.so").unlink(missing_ok=True)
    (cuda / "lib64" / "libcudart.so").symlink_to("../lib/libcudart.so.13")
    subprocess.run(["gcc", "-shared", "-x", "c", "/dev/null", "-Wl,-soname,libcuda.so.1", "-o", str(stub)], check=True)


def main() -> int:
    try:
        build(CONTAINERFILE.read_text())
    except images.ImageFailed as failure:
        print(failure, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
