"""Files that are read again when they change."""

from pathlib import Path

import pytest

from fairlead_router.file_follower import FileFollower


def test_each_version_is_read_once_and_a_failed_read_again(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    one.write_text("1")
    reads: list[str] = []

    def read() -> int:
        reads.append(one.read_text())
        return int(reads[-1])

    files = FileFollower(read, one, other)
    with pytest.raises(FileNotFoundError):
        files.poll()
    other.write_text("")
    assert (files.poll(), files.poll(), reads) == (1, None, ["1"])
    one.write_text("no number")
    with pytest.raises(ValueError, match="no number"):
        files.poll()
    assert files.poll() is None and len(reads) == 2, "a version that is not valid is not read again"
    one.write_text("22")
    assert files.poll() == 22
    other.write_text("changed")
    assert (files.poll(), files.poll()) == (22, None), "each of the files counts"
    other.unlink()
    with pytest.raises(FileNotFoundError):
        files.poll()
    other.write_text("changed")
    assert files.poll() == 22, "an OSError leaves nothing seen"


def test_a_replaced_symbolic_link_is_a_new_version(tmp_path: Path) -> None:
    for version in ("a", "b"):
        (tmp_path / version).write_text(version)
    link = tmp_path / "link"
    link.symlink_to("a")
    file = FileFollower(link.read_text, link)
    assert file.poll() == "a"
    (tmp_path / "new").symlink_to("b")
    (tmp_path / "new").replace(link)
    assert file.poll() == "b"
