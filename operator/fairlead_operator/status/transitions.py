"""Which changes of a status are worth an Event. Pure: a restarted operator finds the status as it was, and says nothing."""

from fairlead_operator.api import ServiceStatus
from fairlead_operator.api.status import Condition
from fairlead_operator.status.conditions import find

Said = tuple[str, str, str]  # type (Normal or Warning), reason, message


def said(before: ServiceStatus, after: ServiceStatus) -> list[Said]:
    """What Ready says when its truth or reason has changed, of a fault also when only its words have; then faults that Ready does not tell:
    an index that is lost, a pod that does not end, a rollout that does not go on. Each decision of the autoscaler is told too."""
    made: list[Said] = []
    size = after.scaling
    if size is not None and size.message and before.scaling is not None and before.scaling.desired_replicas != size.desired_replicas:
        made.append(("Normal", "Scaled", size.message))
    ready, fault = find(after.conditions, "Ready"), find(after.conditions, "Degraded")
    failing = fault is not None and fault.status == "True"
    if ready is not None:
        warns = ready.status != "True" and (ready.reason == "RequestFailed" or failing)
        if _changed(find(before.conditions, "Ready"), ready, words=warns):
            made.append(("Warning" if warns else "Normal", ready.reason, ready.message))
    apart = fault is not None and failing and (ready is None or fault.reason != ready.reason)
    if fault is not None and apart and _changed(find(before.conditions, "Degraded"), fault, words=False):
        made.append(("Warning", fault.reason, fault.message))
    late = find(after.conditions, "Progressing")
    if (
        late is not None
        and late.reason == "ProgressDeadlineExceeded"
        and _changed(find(before.conditions, "Progressing"), late, words=False)
    ):
        made.append(("Warning", late.reason, late.message))
    return made


def _changed(old: Condition | None, new: Condition, *, words: bool) -> bool:
    if old is None or (old.status, old.reason) != (new.status, new.reason):
        return True
    return words and old.message != new.message
