"""Wheel and source distribution: the same bytes in each run, and a wheel that has native kernels."""

import os
import platform
import re
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest
from release.errors import ReleaseFailed
from release.packages import build_packages, check_wheel
from release.tree import Tree, export

CHECKOUT = Path(__file__).parents[2]
needs_tools = pytest.mark.skipif(
    platform.machine() not in ("x86_64", "aarch64")
    or platform.libc_ver()[0] != "glibc"
    or not (shutil.which("gcc") and shutil.which("objdump")),
    reason="no gcc and objdump for a machine with kernels",
)
pytestmark = pytest.mark.usefixtures("build_backend")


def compile_fast(tree: Tree) -> Tree:
    """Compile without optimisation, in a tenth of the time. `make release` compares two builds with it."""
    script = tree.folder / "worker" / "fairlead_worker" / "native" / "build.py"
    assert '"-O3"' in script.read_text()
    script.write_text(script.read_text().replace('"-O3"', '"-O0"'))
    return tree


def read(packages: list[Path]) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in packages}


@pytest.fixture(scope="module")
def packages(build_backend: Path, tree: Tree, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Sorted: the wheel, then the source distribution."""
    folder = tmp_path_factory.mktemp("packages")
    return build_packages(compile_fast(export(CHECKOUT, folder / "tree")), folder / "target", allow_pure=True)


def test_two_runs_give_the_same_wheel_and_sdist(packages: list[Path], other: Tree, tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        again = build_packages(compile_fast(other), tmp_path / "again", allow_pure=True)
    finally:
        os.umask(before)
    assert [path.suffix for path in packages] == [".whl", ".gz"]
    assert read(again) == read(packages)


def test_without_a_compiler_a_release_fails_unless_a_pure_wheel_is_allowed(
    tree: Tree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ReleaseFailed, match=r"-py3-none-any\.whl has no native kernels.*: install gcc.*or give --allow-pure-wheel"):
        build_packages(tree, tmp_path / "refused")
    wheel = next(path for path in build_packages(tree, tmp_path / "allowed", allow_pure=True) if path.suffix == ".whl")
    assert wheel.name == f"fairlead-{tree.version}-py3-none-any.whl"


@needs_tools
def test_the_wheel_names_the_oldest_glibc_that_its_library_needs(packages: list[Path], tmp_path: Path) -> None:
    with zipfile.ZipFile(packages[0]) as wheel:
        library = wheel.extract("fairlead_worker/native/libfairlead.so", tmp_path)
    symbols = subprocess.check_output(["objdump", "-T", library], text=True)
    minor = max(5, *(int(found) for found in re.findall(r"GLIBC_2\.(\d+)", symbols)))
    assert packages[0].name.endswith(f"-py3-none-manylinux_2_{minor}_{platform.machine()}.whl")


@needs_tools
def test_a_library_that_needs_more_than_glibc_has_no_manylinux_tag(build_backend: Path, tmp_path: Path) -> None:
    library = tmp_path / "lib.so"
    command = ["gcc", "-shared", "-fopenmp", "-Wl,--no-as-needed", "-x", "c", "-", "-o", str(library)]
    subprocess.run(command, input="int one(void) { return 1; }", text=True, check=True)
    program = f"import hatch_build, pathlib; hatch_build.needed_glibc(pathlib.Path({str(library)!r}))"
    done = subprocess.run([build_backend, "-c", program], cwd=CHECKOUT, env={}, capture_output=True, text=True)
    assert re.search(r"ValueError: lib\.so needs libgomp\.so\.1, which is no part of glibc", done.stderr), done.stderr


def test_a_wheel_that_package_indexes_refuse_is_no_release() -> None:
    check_wheel("fairlead-0.1.0-py3-none-manylinux_2_17_x86_64.whl", False)
    for allow_pure in (False, True):
        with pytest.raises(ReleaseFailed, match=r"linux_x86_64\.whl: package indexes accept manylinux tags"):
            check_wheel("fairlead-0.1.0-py3-none-linux_x86_64.whl", allow_pure)
