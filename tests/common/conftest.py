"""The encoder of each chat template, made once: the tests of all modules that take it run one template after the other."""

from pathlib import Path

import pytest
from tests.common.talks import PLAIN, encoder_for, encoders, in_transformers

from fairlead_common.prompts.encoder import PromptEncoder, PromptError


@pytest.fixture(params=encoders(), scope="session")
def encoder(request: pytest.FixtureRequest) -> PromptEncoder:
    source = request.param.read_text(encoding="utf-8") if isinstance(request.param, Path) else request.param
    try:
        return encoder_for(source)
    except PromptError as error:
        assert in_transformers(source, PLAIN) is None
        pytest.skip(str(error))
