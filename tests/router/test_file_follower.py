"""Files that are read again when they change."""

import logging
from pathlib import Path

import pytest

from fairlead_router.file_follower import FileFollower


def test_each_version_is_read_once_and_a_failed_read_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    one.write_text("1")
    reads: list[str] = []

    def read() -> int:
        reads.append(one.read_text())
        other.read_text()
        return int(reads[-1])

    files = FileFollower("numbers", read, one, other, default=0)
    assert (files.content, files.problem) == (0, "No such file or directory")
    assert not files.reload() and len(reads) == 2, "an OSError leaves nothing seen"
    other.write_text("")
    assert (files.reload(), files.reload(), files.content, len(reads)) == (True, False, 1, 3)
    one.write_text("no number")
    assert (files.reload(), files.reload(), files.content, len(reads)) == (False, False, 1, 4), "an invalid version is not read again"
    assert "no number" in files.problem
    one.write_text("22")
    assert (files.reload(), files.content, files.problem) == (True, 22, "")
    other.write_text("changed")
    assert not files.reload() and len(reads) == 6, "each of the files counts, and the content is the same"
    assert [record.message.partition("; ")[2] for record in caplog.records if record.levelno == logging.ERROR] == [
        "the default is in use",
        "the version read before stays in use",
    ], "each problem is logged once"


def test_a_replaced_symbolic_link_is_a_new_version(tmp_path: Path) -> None:
    for version in ("a", "b"):
        (tmp_path / version).write_text(version)
    link = tmp_path / "link"
    link.symlink_to("a")
    file = FileFollower("link", link.read_text, link, default="")
    assert file.content == "a"
    (tmp_path / "new").symlink_to("b")
    (tmp_path / "new").replace(link)
    assert file.reload() and file.content == "b"
