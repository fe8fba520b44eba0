"""Build the worker's image for arm64 and serve a tiny model from it, in an emulator: `make image-arm`."""

import shutil
import subprocess
import sys

from e2e.cluster import images
from e2e.cluster.paths import CHECKOUT

ARCH = "arm64"
PROGRAMS = ("buildah", "skopeo", "mmdebstrap", "arch-test")
ADVICE = f"""Programs for {ARCH} do not run here. As root on Debian:
  apt-get install {" ".join(PROGRAMS)}
  apt-get install -t bookworm-backports qemu-user-binfmt   # without -t since Debian 13
  mount -t binfmt_misc binfmt_misc /proc/sys/fs/binfmt_misc   # unless that folder has a file `register`
  cat /usr/lib/binfmt.d/qemu-aarch64.conf > /proc/sys/fs/binfmt_misc/register   # unless systemd has done it
`arch-test {ARCH}` prints `ok` when it works."""
# QEMU 7.2, Debian 12's own, shows the host's CPU features, and torch crashes in it while it is imported.
CHECK = "grep -q ^Features /proc/cpuinfo || { echo 'This QEMU shows no CPU features of Arm: register QEMU 10 or newer' >&2; exit 1; }"
SERVE = """
uname -m
fairlead-worker --help | head -n 1
fairlead make-model /tmp/tiny --arch qwen3 --seed 7
for FAIRLEAD_CPU_ISA in neon neon_bf16; do
    export FAIRLEAD_CPU_ISA
    fairlead doctor > /tmp/doctor
    grep "CPU level" /tmp/doctor
    grep "native kernels.*used on processors" /tmp/doctor
    fairlead-worker --model file:///tmp/tiny --dtype bfloat16 --port 18123 & worker=$!
    fairlead verify http://127.0.0.1:18123/v1 --wait 600
    kill $worker; wait $worker
done
"""


def main() -> int:
    if not all(map(shutil.which, PROGRAMS)) or subprocess.run(["arch-test", ARCH]).returncode != 0:
        print(ADVICE, file=sys.stderr)
        return 1
    try:
        images.run(images.base(ARCH), CHECK, ARCH)
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
