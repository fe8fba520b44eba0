"""Build the worker's image for arm64 and serve a tiny model from it, in an emulator: `make image-arm`."""

import shutil
import subprocess
import sys

from e2e.cluster import images
from e2e.cluster.paths import CHECKOUT

ARCH = "arm64"
PROGRAMS = ("buildah", "skopeo", "mmdebstrap", "arch-test")
ADVICE = f"""The image for {ARCH} is built as root on Debian, by an emulator that the kernel starts for {ARCH}'s programs. Install it with
  mount -t binfmt_misc binfmt_misc /proc/sys/fs/binfmt_misc   # unless that folder has a file `register`
  apt-get install {" ".join(PROGRAMS)} qemu-user-static binfmt-support
`arch-test {ARCH}` then prints `ok`. If it does not, run `update-binfmts --enable qemu-aarch64`."""
SERVE = """
uname -m
fairlead-worker --help | head -n 1
fairlead make-model /tmp/tiny --arch qwen3 --seed 7
for FAIRLEAD_CPU_ISA in neon neon_bf16; do
    export FAIRLEAD_CPU_ISA
    fairlead doctor || true  # it misses what only local mode needs
    fairlead-worker --model /tmp/tiny --port 18123 & worker=$!
    fairlead verify http://127.0.0.1:18123/v1 --wait 600
    kill $worker; wait $worker
done
"""


def main() -> int:
    missing = [program for program in PROGRAMS if not shutil.which(program)]
    if missing or subprocess.run(["arch-test", ARCH]).returncode != 0:
        print(f"Missing programs: {', '.join(missing)}. {ADVICE}" if missing else ADVICE, file=sys.stderr)
        return 1
    try:
        containerfile = CHECKOUT / "images" / "Containerfile.worker"
        image = images.build(f"fairlead-worker-{ARCH}", containerfile, images.WORKER_SOURCES, arch=ARCH)
        images.run(image, SERVE, ARCH)
    except images.ImageFailed as failure:
        print(failure, file=sys.stderr)
        return 1
    print(f"{image} served a model on emulated {ARCH}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
