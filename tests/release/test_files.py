"""The files of a release depend on the commit only, and hold all that they are for."""

import re
import subprocess
import tarfile
from pathlib import Path

import pytest
from release.archives import IMAGES, copied, pack_chart, pack_context
from release.errors import ReleaseFailed
from release.notes import write_notes
from release.oci import write_layout
from release.tree import Tree, export, read_version, uncommitted

CHECKOUT = Path(__file__).parents[2]
CHANGELOG = "# Changelog\n\n## Unreleased\n\n- new\n\n## [0.2.0] - 2026-01-02\n\n- second\n\n## 0.1.0\n\n- first\n"


def make_files(tree: Tree, target: Path) -> dict[str, bytes]:
    """Write chart, contexts and layout, and return all files by name."""
    target.mkdir()
    pack_chart(tree, target)
    for image in IMAGES:
        pack_context(tree, image, target)
    write_layout(tree, target)
    return {str(path.relative_to(target)): path.read_bytes() for path in target.rglob("*") if path.is_file()}


def test_two_runs_give_the_same_bytes(tree: Tree, other: Tree, tmp_path: Path) -> None:
    assert make_files(tree, tmp_path / "first") == make_files(other, tmp_path / "second")


def test_the_time_is_that_of_the_commit_or_source_date_epoch(tree: Tree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert tree.epoch == int(subprocess.check_output(["git", "log", "-1", "--format=%ct"], cwd=CHECKOUT))
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "86400")
    dated = export(CHECKOUT, tmp_path / "files")
    with tarfile.open(pack_chart(dated, tmp_path)) as archive:
        assert {entry.mtime for entry in archive} == {86400} and {entry.uid for entry in archive} == {0}
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "yesterday")
    with pytest.raises(ReleaseFailed, match="SOURCE_DATE_EPOCH is 'yesterday': give whole seconds"):
        export(CHECKOUT, tmp_path / "more")


@pytest.mark.parametrize("image", IMAGES)
def test_a_context_holds_what_its_containerfile_copies(image: str, tree: Tree, tmp_path: Path) -> None:
    with tarfile.open(pack_context(tree, image, tmp_path)) as archive:
        names = archive.getnames()
    containerfile = (tree.folder / "images" / f"Containerfile.{image}").read_text()
    sources = copied(containerfile)
    assert "pyproject.toml" in sources and f"requirements/{image}.txt" in sources and "/native" not in sources
    for source in sources:
        assert any(name == source or name.startswith(f"{source.rstrip('/')}/") for name in names), source
    assert "Containerfile" in names and not any(re.search(r"__pycache__|\.so$|^tests/", name) for name in names)


def test_copied_reads_continued_lines_and_leaves_out_stages() -> None:
    text = "FROM a AS b\nCOPY one \\\n     two /there/\nCOPY --from=b /x /y\nCOPY --chown=1:1 three /z\nRUN COPY\n"
    assert copied(text) == ["one", "two", "three"]


def test_a_copy_without_a_source_is_refused(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "Containerfile.worker").write_text("COPY nothing /there\n")
    with pytest.raises(ReleaseFailed, match=r"Containerfile\.worker copies nothing, which the commit does not have"):
        pack_context(Tree(tmp_path, "c", "1", 0), "worker", tmp_path)


def test_package_and_chart_have_one_version(tmp_path: Path) -> None:
    assert read_version(CHECKOUT)
    (tmp_path / "charts" / "fairlead").mkdir(parents=True)
    (tmp_path / "pyproject.toml").write_text('[project]\nversion = "0.2.0"\n')
    (tmp_path / "charts" / "fairlead" / "Chart.yaml").write_text("version: 0.2.0\nappVersion: 0.1.0\n")
    with pytest.raises(ReleaseFailed, match=r"Chart.yaml has appVersion 0.1.0, and pyproject.toml has 0.2.0: make them equal"):
        read_version(tmp_path)


@pytest.mark.parametrize(
    ("version", "changelog", "since", "text", "source"),
    [
        ("0.2.0", CHANGELOG, "v0.1.0", "- second", "CHANGELOG.md, section 0.2.0"),
        ("0.1.0", CHANGELOG, "", "- first", "CHANGELOG.md, section 0.1.0"),
        ("0.3.0", CHANGELOG, "v0.2.0", "- new", "CHANGELOG.md, section Unreleased"),
        ("0.3.0", "# Changelog\n", "v0.2.0", "## other\n\n- Fix\n\n## router\n\n- bound bytes\n- retry", "commits since v0.2.0"),
        ("0.1.0", "", "", "## other\n\n- Fix\n\n## router\n\n- bound bytes\n- retry", "all commits: there is no tag"),
    ],
)
def test_notes_come_from_the_changelog_or_else_from_commits(version: str, changelog: str, since: str, text: str, source: str) -> None:
    commits = ["router: bound bytes", "Fix", "router: retry"]
    assert write_notes(version, changelog, commits, since) == (f"# Fairlead {version}\n\n{text}\n", source)


def test_files_that_are_not_committed_are_counted_and_left_out(tmp_path: Path) -> None:
    checkout = tmp_path / "checkout"
    (checkout / "charts" / "fairlead").mkdir(parents=True)
    (checkout / "pyproject.toml").write_text('[project]\nversion = "1.0"\n')
    (checkout / "charts" / "fairlead" / "Chart.yaml").write_text('version: "1.0"\nappVersion: "1.0"\n')
    identity = ["-c", "user.name=test", "-c", "user.email=test@example.com", "-c", "commit.gpgsign=false"]
    for command in (["init", "-q"], ["add", "."], [*identity, "commit", "-q", "-m", "first"]):
        subprocess.run(["git", *command], cwd=checkout, check=True)
    assert uncommitted(checkout) == 0
    (checkout / "secret").write_text("x")
    assert uncommitted(checkout) == 1
    assert not (export(checkout, tmp_path / "files").folder / "secret").exists()
