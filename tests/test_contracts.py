"""docs/reference/contracts.md agrees with the code."""

import re
from pathlib import Path

import pytest
from pydantic_settings import BaseSettings

from fairlead_operator.config import OperatorConfig
from fairlead_router.config import RouterConfig
from fairlead_worker.config import WorkerConfig

PAGE = (Path(__file__).parent.parent / "docs" / "reference" / "contracts.md").read_text(encoding="utf-8")


def table(program: str) -> dict[str, str]:
    """Return flag → default from the page's table of this program."""
    section = PAGE.partition(f"### {program}\n")[2].partition("\n#")[0]
    rows = re.findall(r"^\| `--([a-z-]+)` \| (.+?) \| .+ \|$", section, re.MULTILINE)
    assert len(rows) == len(dict(rows)), "one row for each flag"
    return dict(rows)


def shown(config: type[BaseSettings]) -> dict[str, str]:
    words = {"": "empty", None: "empty", True: "on", False: "off"}
    made = {}
    for name, field in config.model_fields.items():
        value = field.default
        plain = int(value) if isinstance(value, float) and value.is_integer() else value
        named = words[value] if isinstance(value, bool | str | None) and value in words else f"`{plain}`"
        made[name.replace("_", "-")] = "required" if field.is_required() else named
    return made


@pytest.mark.parametrize(
    ("program", "config"), [("fairlead-worker", WorkerConfig), ("fairlead-router", RouterConfig), ("fairlead-operator", OperatorConfig)]
)
def test_every_flag_is_on_the_page_with_its_default(program: str, config: type[BaseSettings]) -> None:
    assert table(program) == shown(config)
