"""Which faults of a service an image may have caused. Only these send an update back and stop the rollout over all services.

Other faults, such as a missing node or a gateway that refuses a route, stay when the previous image returns. An update that they hold up
has failed after `spec.rollout.progressDeadlineSeconds`.
"""

from fairlead_operator.api.status import Condition
from fairlead_operator.causes.containers import CONTAINER, CRASHES, IMAGE
from fairlead_operator.causes.weights import OF_WORKERS

DEADLINE = "ProgressDeadlineExceeded"
OF_IMAGES = frozenset(
    {
        *IMAGE,
        *CONTAINER,
        *CRASHES,
        *OF_WORKERS,
        "NotReady",
        "RequestFailed",
        "CanaryFailed",
        "CapacityReduced",
        DEADLINE,
        "AdmissionDenied",  # policies refuse images
        "PodTemplateInvalid",
    }
)
"""Reasons of condition Degraded."""

NO_OBSTACLES = (
    "IndexUnavailable",
    "ReplicasConflict",
    "ControllerNotResponding",
    "SchedulerNotResponding",
    "NodeNotResponding",
    "WorkerFallback",
)
"""Reasons of condition Degraded with which an update may begin: they say nothing about the service's pods, or the pods serve and another
image may mend it."""


def find_image_fault(degraded: Condition | None, progressing: Condition | None) -> str:
    """Return the fault that an image may have caused, as `Reason: message`; empty: there is none."""
    if degraded is not None and degraded.status == "True" and degraded.reason in OF_IMAGES:
        return describe(degraded)
    return describe(progressing) if progressing is not None and progressing.reason == DEADLINE else ""


def find_other_fault(degraded: Condition | None) -> str:
    """Return the fault that no image causes, as `Reason: message`; empty: there is none."""
    return describe(degraded) if degraded is not None and degraded.status == "True" and degraded.reason not in OF_IMAGES else ""


def find_obstacle(degraded: Condition | None) -> str:
    """Return the fault with which an update must not begin, as `Reason: message`; empty: there is none."""
    return describe(degraded) if degraded is not None and degraded.status == "True" and degraded.reason not in NO_OBSTACLES else ""


def describe(bad: Condition) -> str:
    return f"{bad.reason}: {bad.message[:300]}"
