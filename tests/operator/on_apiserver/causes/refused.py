"""Manifests that the real API server refuses by the rules of the CRD (CEL): there is no service, and its answer is the next step."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Refused:
    """`answer`: words of the API server's answer."""

    cause: str
    spec: Mapping[str, Any]
    answer: str


REFUSED = (
    Refused(
        "`gpus` and `tensorParallel` differ",
        {"resources": {"gpus": 1}, "engine": {"tensorParallel": 2}},
        "spec.engine.tensorParallel must equal spec.resources.gpus times spec.engine.nodes",
    ),
    Refused(
        "`secretRef` beside a model that is not downloaded",
        {"model": {"uri": "pvc://weights/qwen", "secretRef": {"name": "hub"}}},
        "spec.model.secretRef needs an hf:// model (token of the hub), or an s3:// or gs:// model (access key): remove it",
    ),
    Refused(
        "`replicas` beside `scaling.target`",
        {"replicas": 2, "scaling": {"maxReplicas": 4, "target": {"ttftMilliseconds": 500}}},
        "both set the number of workers: remove one of them (kubectl scale, HPA and KEDA set spec.replicas)",
    ),
    Refused(
        "`router.tls` beside `Redirect`",
        {"router": {"tls": {"secretName": "web-tls"}}, "routing": {"forwardingMode": "Redirect"}},
        "spec.router.tls and spec.exposure.otherServices: set it to Proxy, or remove these",
    ),
    Refused(
        "`minReplicas` above `maxReplicas`",
        {"scaling": {"minReplicas": 3, "maxReplicas": 2}},
        "spec.scaling.minReplicas must be at most spec.scaling.maxReplicas: change one of the two",
    ),
)
