"""An encoder is refused by its name, before its weights are read, with what can be served instead."""

import pytest
from tests.real_models import MINILM, real_model

from fairlead_worker.errors import ModelLoadError
from fairlead_worker.model.loader import load_model


def test_an_encoder_is_refused_by_name() -> None:
    with pytest.raises(ModelLoadError, match=r"unsupported architecture: BertModel has an encoder .* such as Qwen"):
        load_model(f"file://{real_model(MINILM)}")
