"""The command line: `python -m release [FOLDER]`, and `python -m release --sboms [FOLDER]` for the bills of materials alone."""

import argparse
import hashlib
import shutil
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from e2e.progress import say, step

from release import registry, rehearsal
from release.archives import IMAGES, pack_chart, pack_context
from release.errors import Missing, ReleaseFailed
from release.notes import write_notes
from release.oci import Layout, write_layout
from release.packages import build_packages, write_sboms
from release.tree import Tree, export, git, uncommitted

CHECKOUT = Path(__file__).resolve().parent.parent
SUMS = "SHA256SUMS"


def build(checkout: Path, folder: Path, target: Path, allow_pure: bool) -> tuple[Tree, Layout]:
    """Write all files of a release of the checkout's commit to `target`. Raises ReleaseFailed.

    `folder` is for the commit's files. `allow_pure`: accept a wheel without native kernels.
    """
    tree = export(checkout, folder)
    target.mkdir(parents=True)
    with step("wheel and sdist"):
        build_packages(tree, target, allow_pure)
    with step("chart and image contexts"):
        pack_chart(tree, target)
        for image in IMAGES:
            pack_context(tree, image, target)
    with step("bills of materials"):
        write_sboms(tree, target)
    layout = write_layout(tree, target)
    text, source = read_notes(checkout, tree)
    (target / "RELEASE_NOTES.md").write_text(text)
    say(f"release notes: from {source}")
    (target / SUMS).write_text(checksums(target))
    return tree, layout


def read_notes(checkout: Path, tree: Tree) -> tuple[str, str]:
    """Return (the release notes of a commit, where they come from)."""
    tags = git(checkout, "tag", "--merged", tree.commit, "--sort=-creatordate").splitlines()
    since = next((tag for tag in tags if tag != f"v{tree.version}"), "")
    commits = git(checkout, "log", "--format=%s", f"{since}..{tree.commit}" if since else tree.commit).splitlines()
    return write_notes(tree.version, (tree.folder / "CHANGELOG.md").read_text(), commits, since)


def checksums(target: Path) -> str:
    """Return the lines that `sha256sum --check` reads, for all files below `target`."""
    files = sorted(path for path in target.rglob("*") if path.is_file() and path.name != SUMS)
    return "".join(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.relative_to(target)}\n" for path in files)


def check_equal(first: Path, second: Path) -> None:
    """Raise ReleaseFailed if two builds of a commit differ."""
    sums = [set((target / SUMS).read_text().splitlines()) for target in (first, second)]
    if differing := sorted({line.split("  ", 1)[1] for line in sums[0] ^ sums[1]}):
        raise ReleaseFailed(f"two builds of the same commit differ in {', '.join(differing)}")
    say(f"two builds of the commit have the same bytes: {len(sums[0])} files")


def rehearse(tree: Tree, layout: Layout, target: Path, work: Path) -> list[str]:
    """Push to a local registry and compare. Return what is missing on this machine. Raises ReleaseFailed."""
    missing: list[str] = []
    with step("rehearse the push to a local registry"):
        try:
            with registry.run_registry(registry.find_registry()) as address:
                for line in rehearsal.rehearse(target / "oci", layout.manifests, tree.version, address, work):
                    say(line)
                say(rehearsal.pull_chart(address, tree.version, target / f"fairlead-{tree.version}.tgz", work))
        except Missing as error:
            missing.append(str(error))
    return missing


def release(target: Path, allow_pure: bool = False) -> list[str]:
    """Write a release to `target` and rehearse its push. Return what is missing on this machine. Raises ReleaseFailed."""
    if changed := uncommitted(CHECKOUT):
        say(f"{changed} files differ from the commit, and the release is of the commit: they are left out")
    with tempfile.TemporaryDirectory(prefix="fairlead-release-") as name:
        work = Path(name)
        tree, layout = build(CHECKOUT, work / "tree", work / "release", allow_pure)
        build(CHECKOUT, work / "again", work / "second", allow_pure)
        check_equal(work / "release", work / "second")
        missing = rehearse(tree, layout, work / "release", work)
        shutil.rmtree(target, ignore_errors=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(work / "release", target)
    say(f"{target}: Fairlead {tree.version}, commit {tree.commit[:12]}, SOURCE_DATE_EPOCH {tree.epoch}")
    return missing


def sboms(target: Path) -> list[str]:
    """Write the bills of materials of the commit to `target`. Raises ReleaseFailed."""
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="fairlead-release-") as name, step("bills of materials"):
        for path in write_sboms(export(CHECKOUT, Path(name)), target):
            say(str(path))
    return []


def main() -> int:
    """Return the exit status: 0 done, 1 failed, 3 all files are made but part of the rehearsal needs a program that is missing."""
    parser = argparse.ArgumentParser(prog="python -m release", description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, help="where to write; its earlier content is replaced")
    parser.add_argument("--sboms", action="store_true", help="write only the bills of materials")
    parser.add_argument("--allow-pure-wheel", action="store_true", help="accept a wheel without native kernels, built without a C compiler")
    arguments = parser.parse_args()
    action: Callable[[Path], list[str]] = sboms if arguments.sboms else partial(release, allow_pure=arguments.allow_pure_wheel)
    try:
        missing = action(arguments.folder or CHECKOUT / "build" / ("sbom" if arguments.sboms else "release"))
    except ReleaseFailed as error:
        say(f"release failed: {error}")
        return 1
    for what in missing:
        say(f"not rehearsed, missing: {what}")
    return 3 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
