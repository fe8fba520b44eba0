"""The list of scheduling policies, and the places that cannot import it."""

from pathlib import Path
from typing import get_args

from fairlead_common.scheduling_policy import ENGINE_NAMES, POLICIES, SchedulingPolicy

ROOT = Path(__file__).parents[2]


def test_each_policy_has_names_and_a_line_of_the_documentation() -> None:
    assert set(ENGINE_NAMES) == set(get_args(SchedulingPolicy)) and {names.fairlead for names in ENGINE_NAMES.values()} == set(POLICIES)
    page = (ROOT / "docs/design/engine/policies.md").read_text()
    for name, names in ENGINE_NAMES.items():
        assert f"| `{names.fairlead}`" in page and f"`{name}`" in page
