"""Wheel and source distribution: the same bytes in each run, and a wheel that has native kernels."""

import os
from pathlib import Path

import pytest
from release.errors import ReleaseFailed
from release.packages import build_packages
from release.tree import Tree, export

CHECKOUT = Path(__file__).parents[2]
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
def packages(build_backend: None, tree: Tree, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
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
