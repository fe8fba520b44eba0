"""docs/reference/limits.md and connection-limits.md name only existing settings, and all that limit a client."""

import re
from pathlib import Path

from fairlead_router.config import RouterConfig
from fairlead_worker.config import Limits, WorkerConfig
from fairlead_worker.config.options import topic_of

PAGES = tuple(Path(__file__).parents[2] / "docs" / "reference" / name for name in ("limits.md", "connection-limits.md"))
SHARED = {"max_body_bytes", "header_timeout", "body_timeout", "max_connections"}


def test_the_pages_name_only_existing_settings() -> None:
    settings = [line.split("|")[-2] for page in PAGES for line in page.read_text().splitlines() if line.startswith("| ")]
    named = {name for cell in settings for name in re.findall(r"`([a-z_-]+)`", cell)}
    flags = {"--" + name.replace("_", "-") for name, field in WorkerConfig.model_fields.items() if topic_of(field)}
    flags |= {"--" + name.replace("_", "-") for name in RouterConfig.model_fields}
    assert named - flags <= Limits.model_fields.keys()
    assert named >= SHARED | {"max_grammar_bytes", "--max-waiting-requests", "--max-inflight-bytes"}


def test_both_components_have_the_same_limits_of_connections() -> None:
    assert all(Limits.model_fields[name].default == RouterConfig.model_fields[name].default for name in SHARED)
