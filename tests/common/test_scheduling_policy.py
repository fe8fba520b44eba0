"""The list of scheduling policies, and the places that cannot import it."""

from pathlib import Path
from typing import get_args

from fairlead_common.scheduling_policy import DEFINITIONS, POLICIES, SchedulingPolicy

ROOT = Path(__file__).parents[2]


def test_each_policy_has_names_and_a_line_of_the_documentation() -> None:
    assert set(DEFINITIONS) == set(get_args(SchedulingPolicy)) and {policy.fairlead for policy in DEFINITIONS.values()} == set(POLICIES)
    page = (ROOT / "docs/design/engine/policies.md").read_text()
    for name, policy in DEFINITIONS.items():
        assert f"| `{policy.fairlead}`" in page and f"`{name}`" in page, "add a row to docs/design/engine/policies.md"
