"""`/internal/schedule`: the end of a worker's trace of steps, for the router's console."""

import os
from pathlib import Path

import pytest
from tests.worker.api.process import WorkerProcess

from fairlead_worker.api.admin.schedule import MAX_BYTES, read_end

FIRST = b'{"format":"fairlead-schedule-1"}\n'


def test_without_a_trace_it_is_404_with_the_flag_to_set(shared: WorkerProcess) -> None:
    answer = shared.client.get("/internal/schedule")
    assert answer.status_code == 404 and "--trace-schedule FILE" in answer.json()["error"]["message"]


def test_only_whole_lines_and_the_first_one_are_read(tmp_path: Path) -> None:
    path, lines = tmp_path / "steps", [f'{{"step":{number}}}\n'.encode() for number in range(20_000)]
    path.write_bytes(FIRST + b"".join(lines) + b'{"step":')
    end = read_end(path)
    assert end.startswith(FIRST) and end.endswith(lines[-1]) and len(end) <= MAX_BYTES + len(FIRST)
    assert set(end.splitlines(keepends=True)[1:]) <= set(lines)
    for short in (FIRST, FIRST + lines[0], b""):
        path.write_bytes(short)
        assert read_end(path) == short


def test_a_pipe_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="not a regular file"):
        read_end(tmp_path / "pipe")
