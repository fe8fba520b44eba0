"""Selects the changes of a status that are worth an Event. Pure: a restarted operator finds the previous status, and repeats no Event."""

from fairlead_operator.api import ServiceStatus
from fairlead_operator.api.status import Condition
from fairlead_operator.status.conditions import find
from fairlead_operator.status.progress import DEADLINE
from fairlead_operator.status.revisions import update_events

EventText = tuple[str, str, str]  # type (Normal or Warning), reason, message


def events_for(before: ServiceStatus, after: ServiceStatus) -> list[EventText]:
    """Return the Events of a change, in this order:

    - Ready, when its status or reason changed; for a fault also when only its message changed;
    - faults that Ready does not report: lost capacity, an unavailable index, a pod that does not terminate, a stalled rollout;
    - the begin and the end of a rollout or of a canary, when Ready says nothing else.

    Each decision of the autoscaler, and each step of an update to new images, comes first.
    """
    items: list[EventText] = []
    size = after.scaling
    if size is not None and size.message and before.scaling is not None and before.scaling.desired_replicas != size.desired_replicas:
        items.append(("Normal", "Scaled", size.message))
    items += update_events(before.image_update, after.image_update)
    ready, fault = find(after.conditions, "Ready"), find(after.conditions, "Degraded")
    failing = fault is not None and fault.status == "True"
    if ready is not None:
        warns = ready.status != "True" and (ready.reason == "RequestFailed" or failing)
        if _changed(find(before.conditions, "Ready"), ready, words=warns):
            items.append(("Warning" if warns else "Normal", ready.reason, ready.message))
    apart = fault is not None and failing and (ready is None or fault.reason != ready.reason)
    if fault is not None and apart and _changed(find(before.conditions, "Degraded"), fault, words=False):
        items.append(("Warning", fault.reason, fault.message))
    step_before, step = find(before.conditions, "Progressing"), find(after.conditions, "Progressing")
    if step is not None and step.reason not in {reason for _, reason, _ in items} and _is_told(step_before, step):
        stopped = step.reason == DEADLINE or (failing and fault is not None and step.status != "True" and step.reason == fault.reason)
        items.append(("Warning" if stopped else "Normal", step.reason, step.message))
    return items


def _is_told(old: Condition | None, new: Condition) -> bool:
    """Return whether a change of Progressing is worth an Event: not a probe, and not a change of the size, which has Events of its own."""
    if new.reason in ("Probing", "Scaling") or not _changed(old, new, words=False):
        return False
    return new.reason != "Complete" or (old is not None and old.reason != "Scaling")


def _changed(old: Condition | None, new: Condition, *, words: bool) -> bool:
    if old is None or (old.status, old.reason) != (new.status, new.reason):
        return True
    return words and old.message != new.message
