"""Flags of fairlead-worker that only the operator sets: other objects rely on their values, so `spec.engine.args` must not repeat them.

Other flags that a field sets stay allowed there, because `--scheduling-policy` and others take more values than their fields. There is no
CEL rule: it could not name the flag that it found.
"""

from collections.abc import Sequence

from fairlead_operator.api.fields import refuse

_PORTS = "remove it: Services, probes and routers use the operator's value"
_NODES = "set spec.engine.nodes, which starts a pod for each node"
OWNED_FLAGS = {
    "model": "set spec.model.uri",
    "served-model-name": "set spec.model.name",
    "lora-modules": "set spec.model.adapters",
    "api-key-file": "set spec.access.keysSecretRef, and routers check the keys; workers answer only them",
    "host": _PORTS,
    "port": _PORTS,
    "page-size": "set spec.engine.kvCache.pageTokens",
    "block-tokens": "set spec.engine.kvCache.blockTokens",
    "tensor-parallel-size": "set spec.engine.tensorParallel",
    "nnodes": _NODES,
    "node-rank": _NODES,
    "master-addr": _NODES,
    "drain-timeout": "set spec.rollout.drainTimeoutSeconds",
}
"""What to do instead of each flag."""


def refuse_owned_flags(args: Sequence[str]) -> None:
    """Raise ValueError, with the flag and what to set instead, for a flag that the operator sets."""
    for arg in args:
        flag = arg.partition("=")[0]
        instead = OWNED_FLAGS.get(flag.removeprefix("--")) if flag.startswith("--") else None
        refuse(instead is not None, f"spec.engine.args must not have {flag}: {instead}")
