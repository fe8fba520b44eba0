"""Specs that the API accepts, but this release or this cluster cannot serve.

They are reported immediately and change nothing. Otherwise their pods would hold GPUs and crash.
"""

from collections.abc import Collection

from fairlead_operator.api import InferenceService
from fairlead_operator.kube.kinds import WORKER_SETS

REASON, MISSING = "TensorParallelUnsupported", "LeaderWorkerSetMissing"
MAX_GPUS_PER_NODE = 8
"""GPUs of one node, as nearly all clouds and vendors sell them: a pod that requests more would wait forever."""


def find_unsupported(service: InferenceService, served: Collection[str], unknown: Collection[str] = ()) -> tuple[str, str] | None:
    """Return reason and message where the spec cannot be served; None otherwise.

    `served`: the optional kinds that the cluster serves. `unknown`: the kinds for which no answer has come yet.
    """
    engine = service.spec.engine
    stages, nodes = service.spec.pipeline_stages, engine.nodes
    ranks = engine.tensor_parallel * stages
    stays = "The running pods stay unchanged."
    if stages > 1 and ranks > MAX_GPUS_PER_NODE:
        return REASON, (
            f"spec.engine.tensorParallel times the pipeline stages in spec.engine.args is {ranks}, and a pod's GPUs are one node's: "
            f"set {MAX_GPUS_PER_NODE} or less. {stays}"
        )
    if ranks > MAX_GPUS_PER_NODE * nodes:
        over = f" over {nodes} nodes" if nodes > 1 else ""
        return REASON, (
            f"spec.engine.tensorParallel is {ranks}{over}, and a pod's GPUs are one node's: set it to {MAX_GPUS_PER_NODE * nodes} or less, "
            f"or divide the model over more nodes in a new service (spec.engine.nodes: {-(-ranks // MAX_GPUS_PER_NODE)}). {stays}"
        )
    kind, needed = WORKER_SETS.kind, f"spec.engine.nodes is {nodes}, which needs {WORKER_SETS.kind} ({WORKER_SETS.api_version}"
    if nodes > 1 and kind in unknown:
        return MISSING, (
            f"{needed}), and the API server has not answered yet whether it serves it: see the operator's log. The operator asks again "
            f"within 30 s. {stays}"
        )
    if nodes > 1 and kind not in served:
        return MISSING, (
            f"{needed}, release 0.9 or newer), and this cluster does not serve it: install it as "
            f"https://lws.sigs.k8s.io/docs/installation says. The operator checks again every 30 s. {stays}"
        )
    return None
