"""Flags of fairlead-worker that only the operator sets: other objects rely on their values, so `spec.engine.args` must not repeat them.

No worker can serve with another value of these flags. Other flags that a field sets stay allowed: a stored service may have them, and
`--scheduling-policy` and others take more values than their fields. There is no CEL rule: it could not name the flag that it found.
"""

from collections.abc import Sequence

from fairlead_operator.api.fields import refuse

_PORTS = "remove it: Services, probes and routers use the operator's value"
_NODES = "set spec.engine.nodes, which starts a pod for each node"
OWNED_FLAGS = {
    "model": "set spec.model.uri",
    "api-key-file": "set spec.access.keysSecretRef, and routers check the keys; workers answer only them",
    "port": _PORTS,
    "tensor-parallel-size": "set spec.engine.tensorParallel",
    "nnodes": _NODES,
    "node-rank": _NODES,
    "master-addr": _NODES,
}
"""What to do instead of each flag."""


def refuse_owned_flags(args: Sequence[str]) -> None:
    """Raise ValueError, with the flag and what to set instead, for a flag that the operator sets."""
    for arg in args:
        flag = arg.partition("=")[0]
        instead = OWNED_FLAGS.get(flag.removeprefix("--")) if flag.startswith("--") else None
        refuse(instead is not None, f"spec.engine.args must not have {flag}: {instead}")
