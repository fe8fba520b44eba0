"""The files of the checkout's commit, at the time of the commit."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from release.tree import Tree, export
from tests.own_environment import OwnEnvironment

CHECKOUT = Path(__file__).parents[2]


@pytest.fixture(scope="session", autouse=True)
def commit_time() -> Iterator[None]:
    """The environment's SOURCE_DATE_EPOCH has no part in these tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("SOURCE_DATE_EPOCH", raising=False)
        yield


@pytest.fixture(scope="session")
def tree(commit_time: None, tmp_path_factory: pytest.TempPathFactory) -> Tree:
    if not (CHECKOUT / ".git").exists():
        pytest.skip("not a git checkout")
    return export(CHECKOUT, tmp_path_factory.mktemp("tree") / "files")


@pytest.fixture
def other(tree: Tree, tmp_path: Path) -> Tree:
    """The commit once more: in another folder, with other times and another umask."""
    before = os.umask(0o077)
    try:
        again = export(CHECKOUT, tmp_path / "elsewhere")
    finally:
        os.umask(before)
    for path in again.folder.rglob("*.*"):
        os.utime(path, (1, 1))
    return again


@pytest.fixture(scope="session")
def build_backend() -> Path:
    """The Python of an environment with the pinned build backend."""
    environment = OwnEnvironment("build-backend", CHECKOUT / "requirements" / "build.txt")
    if problem := environment.install():
        pytest.skip(f"no build backend: {problem}")
    return environment.python
