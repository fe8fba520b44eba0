"""Causes of a service that is not in its desired state: a reason for machines, and for people what is wrong and what to do.

`pods` reads one pod, and chooses among several. `containers`, `scheduling`, `weights` and `events` parse the messages of kubelets,
schedulers, workers and Events. `creation` parses refusals of a pod or a template. `unresponsive` finds components that do not act, and
`field_conflicts` writers that keep changing our fields.
"""

from fairlead_operator.causes.cause import Cause
from fairlead_operator.causes.pods import find_pod_cause, find_worst_cause
from fairlead_operator.observed import PodEvent

__all__ = ["Cause", "PodEvent", "find_pod_cause", "find_worst_cause"]
