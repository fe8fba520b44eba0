"""The reason of a failure reaches the kubelet and people."""

import logging
from pathlib import Path

import pytest

from fairlead_common.termination import TERMINATION_BYTES, report_failure


def test_the_reason_is_in_the_termination_log_and_the_last_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report_failure("fairlead-agent", "no room" * 1000, str(tmp_path / "why"), "text") == 1
    assert (tmp_path / "why").read_text() == ("no room" * 1000)[:TERMINATION_BYTES]
    assert capsys.readouterr().err.startswith("fairlead-agent: no room")


def test_a_file_below_dev_is_not_created(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        assert report_failure("fairlead-agent", "no room", "/dev/fairlead-no-kubelet", "json") == 1
    assert not Path("/dev/fairlead-no-kubelet").exists()
    assert [record.message for record in caplog.records] == ["no room"]


def test_a_log_that_cannot_be_written_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert report_failure("fairlead-worker", "no room", str(tmp_path), "text") == 1
    assert f"FAIRLEAD_TERMINATION_LOG {tmp_path} cannot be written" in caplog.text
