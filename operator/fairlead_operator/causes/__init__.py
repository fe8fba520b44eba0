"""Why a service is not as wanted, lifted from what Kubernetes knows: one word for machines; for people what is wrong and what to do.

`pods` reads one pod and chooses among many; `containers`, `scheduling`, `weights` and `happened` know the words of kubelets, schedulers,
workers and Events; `creation` those of what refuses a pod or a template; `silence` tells when nobody says anything; `contested` who
keeps changing what is ours.
"""

from fairlead_operator.causes.cause import Cause
from fairlead_operator.causes.pods import of_pod, of_pods
from fairlead_operator.observed import PodEvent

__all__ = ["Cause", "PodEvent", "of_pod", "of_pods"]
