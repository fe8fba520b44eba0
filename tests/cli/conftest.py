import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder for unix sockets, whose paths may have 107 characters: `tmp_path` uses most of them, even more in parallel runs."""
    made = Path(tempfile.mkdtemp(prefix="fl-", dir="/tmp"))
    yield made
    shutil.rmtree(made, ignore_errors=True)
