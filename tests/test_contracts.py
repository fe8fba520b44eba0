"""docs/contracts.md says what the code says."""

from pathlib import Path

import pytest
from pydantic_settings import BaseSettings

from fairlead_operator.config import OperatorConfig
from fairlead_router.config import RouterConfig
from fairlead_worker.config import WorkerConfig

PAGE = (Path(__file__).parent.parent / "docs" / "contracts.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("config", [WorkerConfig, RouterConfig, OperatorConfig])
def test_every_flag_is_on_the_page(config: type[BaseSettings]) -> None:
    flags = ["--" + name.replace("_", "-") for name in config.model_fields]
    assert [flag for flag in flags if flag not in PAGE] == []
