"""The tests of the compiled kernels and of a native step with Arm's kernels, by emulation: `python -m tests.arm`, as `make test-arm` does.

Takes minutes. Needs a cross compiler and qemu-user; where they are missing it says so and passes.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from fairlead_worker.native import build

COMPILER, PACKAGES = "aarch64-linux-gnu-gcc", "gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user-static"
TESTS = (
    "tests/worker/kernels/test_attention.py",
    "tests/worker/kernels/test_native.py",
    "tests/worker/native/test_elementwise.py",
    "tests/worker/native/test_gated.py",
    "tests/worker/native/test_linear.py",
    "tests/worker/execution/test_native_forward.py",
)


def main() -> int:
    if not shutil.which(COMPILER) or not shutil.which("qemu-aarch64-static"):
        print(f"Arm's kernels are not tested: there is no {COMPILER} or no qemu-aarch64-static. On Debian: apt-get install {PACKAGES}")
        return 0
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        library, driver = Path(folder, "libfairlead.so"), Path(folder, "driver")
        if problem := build.compile_library(COMPILER, build.MACHINES["aarch64"], library):
            print(problem)
            return 1
        subprocess.run(
            [
                COMPILER,
                "-O2",
                "-Wall",
                "-Wextra",
                "-Werror",
                "-Wl,--no-as-needed",
                Path(__file__).with_name("driver.c"),
                "-o",
                driver,
                "-ldl",
                "-lgomp",
            ],
            check=True,
        )
        for level in build.MACHINES["aarch64"]:
            print(f"== CPU level {level}, emulated", flush=True)
            settings = {"LEVEL": level, "LIBRARY": str(library), "DRIVER": str(driver)}
            environment = os.environ | {f"FAIRLEAD_TEST_ARM_{name}": value for name, value in settings.items()}
            command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.arm.plugin", "--timeout", "900", *(sys.argv[1:] or TESTS)]
            if subprocess.run(command, env=environment).returncode:
                failed.append(level)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
