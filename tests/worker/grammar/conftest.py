"""One tiny random model with a tokenizer of its own."""

import pytest
from tests.models import one_thread
from tests.worker.grammar.serving import Model

from fairlead.random_model.build import make_model

__all__ = ["one_thread"]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(make_model(tmp_path_factory.mktemp("grammar") / "tiny", "qwen3", vocab=1024, layers=1))
