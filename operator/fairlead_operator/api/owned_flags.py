"""Flags of the engine that only the operator sets: other objects rely on their values, so `spec.engine.args` must not repeat them.

No worker can serve with another value of these flags. Other flags that a field sets stay allowed: a stored service may have them, and
`--scheduling-policy` and others take more values than their fields. There is no CEL rule: it could not name the flag that it found.
"""

import re
from collections.abc import Mapping, Sequence

from fairlead_operator.api.engine_runtime import Runtime
from fairlead_operator.api.fields import refuse

_PORTS = "remove it: Services, probes and routers use the operator's value"
_NODES = "set spec.engine.nodes, which starts a pod for each node"
_URI, _PARALLEL = "set spec.model.uri", "set spec.engine.tensorParallel"
_STAGES = "Fairlead's engine has no pipeline parallelism: set spec.engine.tensorParallel, or spec.engine.runtime to VLLM or SGLang"
_KEYS = "set spec.access.keysSecretRef, and routers check the keys; workers answer only them"
OWNED_FLAGS = {
    "model": _URI,
    "api-key-file": _KEYS,
    "port": _PORTS,
    "tensor-parallel-size": _PARALLEL,
    "nnodes": _NODES,
    "node-rank": _NODES,
    "master-addr": _NODES,
}
"""What to do instead of each flag."""

_LOOPBACK = "remove it: the engine serves its agent only, on the loopback of the pod"
_ONE_CACHE = "set spec.replicas: the engine behind an agent has one KV cache"
_ONE_POD = "remove it: a replica runs in one pod"
_CACHED = "remove it: the prefix index follows the engine's prefix cache"
_OF_ENGINES = {
    "model": _URI,
    "revision": "set spec.model.revision",
    "served-model-name": "set spec.model.name",
    "host": _LOOPBACK,
    "port": _LOOPBACK,
    "api-key": _KEYS,
    "tensor-parallel-size": _PARALLEL,
    "tp": _PARALLEL,
    "data-parallel-size": _ONE_CACHE,
    "dp": _ONE_CACHE,
    "nnodes": _ONE_POD,
    "node-rank": _ONE_POD,
    "kv-events-config": "remove it: the agent reads the events at the operator's address",
}
ENGINE_FLAGS: Mapping[Runtime, Mapping[str, str]] = {
    "Fairlead": {**OWNED_FLAGS, "pipeline-parallel-size": _STAGES},
    "VLLM": {
        **_OF_ENGINES,
        "uds": _LOOPBACK,
        "ssl-keyfile": _LOOPBACK,
        "lora-modules": "set spec.model.adapters",
        "no-enable-prefix-caching": _CACHED,
        "disable-log-stats": "remove it: the agent reads the load of the engine from its metrics",
    },
    "SGLang": {
        **_OF_ENGINES,
        "model-path": _URI,
        "tp-size": _PARALLEL,
        "dp-size": _ONE_CACHE,
        "dist-init-addr": _ONE_POD,
        "disable-radix-cache": _CACHED,
        "lora-paths": "remove it: the events of SGLang do not name adapters",
    },
}
"""What to do instead of each flag of a runtime's engine."""


_PIPELINE = re.compile(r"--?(pp|pp-size|pipeline.*)")  # vLLM takes the beginning of a flag too
PIPELINE = "^--?p(p|ipeline)"
"""Flags of vLLM and SGLang for pipeline parallelism, as CEL finds them. CEL cannot read their number."""


def pipeline_stages(args: Sequence[str], runtime: Runtime) -> int:
    """Return the stages of an engine's pipeline parallelism, each with the GPUs of `tensorParallel`; 1 without the flag.

    Raises ValueError for a value that is no number.
    """
    stages = 1
    for index, arg in enumerate(args):
        flag, has_value, value = arg.partition("=")
        if runtime != "Fairlead" and _PIPELINE.fullmatch(flag.replace("_", "-")):
            value = value if has_value else "".join(args[index + 1 : index + 2])
            refuse(not value.isdecimal() or int(value) < 1, f"spec.engine.args: {flag} must have a number of at least 1 (got {value!r})")
            stages = int(value)
    return stages


def refuse_owned_flags(args: Sequence[str], runtime: Runtime = "Fairlead") -> None:
    """Raise ValueError, with the flag and what to set instead, for a flag that the operator sets."""
    for arg in args:
        flag = arg.partition("=")[0]
        name = flag.removeprefix("--")
        if runtime != "Fairlead":  # vLLM reads --tensor_parallel_size, -tp and --kv-events-config.endpoint too
            name = name.lstrip("-").partition(".")[0].replace("_", "-")
        instead = ENGINE_FLAGS[runtime].get(name) if flag.startswith("-") and (flag.startswith("--") or runtime != "Fairlead") else None
        refuse(instead is not None, f"spec.engine.args must not have {flag}: {instead}")
