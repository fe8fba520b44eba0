"""`spec.podDisruptionBudget`: limit of voluntary evictions, in pods or in percent."""

import re
from typing import Annotated

from pydantic import AfterValidator, Field, WithJsonSchema

from fairlead_operator.api.fields import Part, refuse, rule, ruled, rules

MOST = 1000
_BOTH = "spec.podDisruptionBudget.minAvailable and maxUnavailable exclude each other, as in Kubernetes: remove one of the two"
_HELP = f"must be a number from 0 to {MOST} without quotes, or a percentage from 0% to 100%"
_PERCENT = "^([0-9]|[1-9][0-9]|100)%$"


def _check(value: int | str) -> int | str:
    known = 0 <= value <= MOST if isinstance(value, int) else re.match(_PERCENT, value) is not None
    refuse(not known, f"spec.podDisruptionBudget: {_HELP} (got {value!r})")
    return value


# A union has no structural schema of its own: Kubernetes' IntOrString is marked by an extension.
IntOrPercent = Annotated[
    int | str,
    AfterValidator(_check),
    WithJsonSchema(
        {
            "x-kubernetes-int-or-string": True,
            "maxLength": 4,  # without a bound, the API server cannot estimate the cost of the rule
            **rules(
                rule(f"type(self) == int ? self >= 0 && self <= {MOST} : self.matches('{_PERCENT}')", f"spec.podDisruptionBudget: {_HELP}")
            ),
        }
    ),
]


class PodDisruptionBudget(Part):
    """Limit of voluntary evictions, such as node drains."""

    model_config = ruled(
        # The API server writes the default of maxUnavailable, so a manifest's own 1 cannot be told from it.
        rule("!has(self.minAvailable) || self.maxUnavailable == 1", _BOTH, path=".minAvailable")
    )

    max_unavailable: IntOrPercent = Field(1, description="Workers that may be evicted at the same time, such as 1 or 25%.")
    min_available: IntOrPercent | None = Field(None, description="Workers that must stay, such as 2 or 75%. Replaces maxUnavailable.")

    def check_rules(self) -> None:
        refuse(self.min_available is not None and self.max_unavailable != 1, f"{_BOTH} ({self.min_available}, {self.max_unavailable})")
