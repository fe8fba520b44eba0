"""docs/reference/limits.md names only existing flags, and all flags that limit a client."""

import re
from pathlib import Path

from fairlead_router.config import RouterConfig
from fairlead_worker.config import WorkerConfig

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "limits.md"
BOUNDS = {"--max-body-bytes", "--max-header-bytes", "--max-headers", "--header-timeout", "--body-timeout", "--max-connections"}


def test_the_page_names_only_existing_flags() -> None:
    flags = {config: {"--" + name.replace("_", "-") for name in config.model_fields} for config in (WorkerConfig, RouterConfig)}
    named = set(re.findall(r"`(--[a-z-]+)`", PAGE.read_text()))
    assert named <= set().union(*flags.values())
    assert named >= BOUNDS | {"--max-logprob-entries", "--max-grammar-bytes", "--max-waiting-requests", "--max-inflight-bytes"}
    assert all(of >= BOUNDS for of in flags.values()), "the same names in both components"
    assert all(WorkerConfig.model_fields[name].default == RouterConfig.model_fields[name].default for name in map(_field, BOUNDS))


def _field(flag: str) -> str:
    return flag[2:].replace("-", "_")
