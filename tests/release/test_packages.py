"""The wheel of a release has native kernels."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from release.errors import ReleaseFailed
from release.packages import build_packages
from release.tree import Tree, export
from tests.own_environment import OwnEnvironment

CHECKOUT = Path(__file__).parents[2]
PINS = CHECKOUT / "requirements" / "build.txt"


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tree]:
    """The files of the commit. The environment's SOURCE_DATE_EPOCH has no part in it."""
    if not (CHECKOUT / ".git").exists():
        pytest.skip("not a git checkout")
    if problem := OwnEnvironment("build", PINS).install():
        pytest.skip(f"no build backend: {problem}")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("SOURCE_DATE_EPOCH", raising=False)
        yield export(CHECKOUT, tmp_path_factory.mktemp("tree") / "files")


def test_without_a_compiler_a_release_fails_unless_a_pure_wheel_is_allowed(
    tree: Tree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ReleaseFailed, match=r"-py3-none-any\.whl has no native kernels.*: install gcc.*or give --allow-pure-wheel"):
        build_packages(tree, tmp_path / "refused")
    wheel = next(path for path in build_packages(tree, tmp_path / "allowed", allow_pure=True) if path.suffix == ".whl")
    assert wheel.name == f"fairlead-{tree.version}-py3-none-any.whl"
