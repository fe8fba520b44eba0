"""Expected tokens for the modelled device, and torch on one thread."""

import pytest
from tests.models import one_thread
from tests.worker.cuda.engine import expected_answers

__all__ = ["one_thread"]


@pytest.fixture(scope="package")
def expected() -> list[list[int]]:
    """Tokens of each prompt, alone on the CPU."""
    return expected_answers()
