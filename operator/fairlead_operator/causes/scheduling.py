"""A pod without a node: which resource is insufficient, as the scheduler reports it, and what to do about it."""

import re

from fairlead_operator.causes.cause import Cause, find_advice, make_cause
from fairlead_operator.causes.fields import Fields

_LACKS = re.compile(r"(\d+) Insufficient ([\w-]+(?:[./][\w-]+)*)")
_OF = re.compile(r"0/(\d+) nodes")

# The scheduler's message → advice, with the component's fields. Only the first two matches are given: more are too many to read.
_ADVICE = (
    (r"Insufficient (?:nvidia|amd)\.com/gpu", "Free a GPU, add a node with GPUs{fewer} (to run on CPUs, set spec.resources.gpus: 0)."),
    (
        r"Insufficient ((?!(?:nvidia|amd)\.com/gpu)[\w-]+\.[\w.-]+/[\w.-]+)(?<![.])",
        "Add a node with {0}, or ask for fewer of it. If no node has it, correct spec.resources.gpuResource.",
    ),
    (
        r"cannot allocate all claims",
        "Free a device that the ResourceClaimTemplate selects, add a node with one, or correct its selectors (kubectl get resourceslices).",
    ),
    (
        r"volume node affinity conflict|didn't match PersistentVolume's node affinity",
        "The claim's volume is on another node or zone: free room there, or use a claim that all nodes can mount.",
    ),
    (r"Insufficient cpu", "Lower {cpu}, or add a node."),
    (r"Insufficient memory", "Lower {memory}, or add a node."),
    (r"Insufficient ephemeral-storage", "Ask for less ephemeral storage in {template}, or add a node with a larger disk."),
    (r"Too many pods", "Every suitable node has reached its limit of pods: add a node."),
    (r'persistentvolumeclaim "([^"]+)" not found', "Create the PersistentVolumeClaim {0}, or correct the name in {claim}."),
    (r'persistentvolumeclaim "([^"]+)" is being deleted', "The claim {0} is being deleted: wait, then create it again."),
    (
        r"unbound immediate PersistentVolumeClaims",
        "See why the claim is not bound: kubectl describe pvc (no such StorageClass, or no volume).",
    ),
    (r"untolerated taint \{([^}]+)\}", "Tolerate {0} in {template}.spec.tolerations, if {pods} may run there."),
    (
        r"untolerated taint\(s\)",
        "Tolerate the node's taints (kubectl describe node) in {template}.spec.tolerations, if {pods} may run there.",
    ),
    (
        r"match Pod's node affinity|node selector",
        "No node has the required labels: correct the nodeSelector or affinity, or label a node ({template}).",
    ),
    (r"topology spread constraints", "Relax the topologySpreadConstraints of {template}."),
    (r"were unschedulable", "Nodes are cordoned: kubectl uncordon NODE when they may be used again."),
    (r"no nodes available", "The cluster has no node: add one."),
)


_PREEMPTION = re.compile(r"(?: no new claims to deallocate,)? preemption: .*", re.DOTALL)
"""The end of a scheduler's message: it says that no other pod makes room either."""


def find_cause(pod: str, reason: str, message: str, fields: Fields) -> Cause:
    """Return the cause of a pod whose condition PodScheduled is False."""
    if reason == "SchedulingGated":
        return make_cause(
            "SchedulingGated", f"pod {pod} waits for its scheduling gates: {message}", "A queue (such as Kueue) admits it.", fault=False
        )
    words = message or "no node takes it"
    nodes = _OF.search(words)
    lacks = ", ".join(f"{name} on {count} of {nodes[1] if nodes else '?'} nodes" for count, name in _LACKS.findall(words)[:3])
    what = f"pod {pod} has no node{f' (short of {lacks})' if lacks else ''}: {_PREEMPTION.sub('', words)}"
    return make_cause(
        "FailedScheduling", what, " ".join(find_advice(_ADVICE, words, fields.words)[:2]) or f"See kubectl describe pod {pod}."
    )
