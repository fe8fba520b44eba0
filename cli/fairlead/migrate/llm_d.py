"""Helm values of llm-d's model service."""

import re
from collections.abc import Mapping
from typing import Any

from fairlead.migrate.command_line import read_command
from fairlead.migrate.draft import Draft
from fairlead.migrate.fields import Fields, NotMigratable, show, whole
from fairlead.migrate.finish import finish
from fairlead.migrate.pods import read_container, read_pod, reasons_of_pod
from fairlead.migrate.sources import Context, Source
from fairlead.migrate.tables import Field, apply, flag, node_terms

_ROUTING = "routers of the InferenceService replace it: nothing to do"
_MODEL_SERVICE_REASONS = {
    **reasons_of_pod("decode", "decode.containers"),
    "modelArtifacts.size": "the size of the volume for downloads: set spec.model.cache to bound or keep it",
    "modelArtifacts.mountPath": "the operator sets the path: nothing to do",
    "modelArtifacts.readOnly": "a pvc:// model is mounted read-only, and a cache is writable: nothing to do",
    "modelArtifacts.labels": "labels by which the InferencePool selects: exposure.gateway makes its own pool",
    "routing": _ROUTING,
    "prefill": "a worker computes both prefill and decode: add prefill.replicas to spec.replicas to keep the number of GPUs",
    "multinode": "the GPUs of a worker decide it: nothing to do",
    "decode.create": "",
    "decode.containers.modelCommand": "",
    "decode.containers.mountModelVolume": "",
    "decode.parallelism.dataLocal": "each part of data parallelism is a worker: nothing to do",
    "decode.resourceClaims": "name them in spec.resources.resourceClaims, or in spec.podTemplate if they are no GPUs",
    "decode.autoscaling": "set spec.scaling",
    "decode.monitoring": "the chart of Fairlead makes PodMonitors (monitoring.podMonitors): nothing to do",
    "decode.strategy": "set spec.rollout",
    "decode.extraConfig": "write it into spec.podTemplate.spec",
    "accelerator": "the resource name is spec.resources.gpuResource: nothing to do",
    "accelerator.dra": "name your ResourceClaimTemplate in spec.resources.resourceClaims",
    "tracing": "tracing is configured for all services in the chart (docs/operate/tracing.md)",
    "requester": "nothing replaces it: delete it with the old release",
    "extraObjects": "apply them yourself",
    "fullnameOverride": "",
}
_ACCELERATORS = {
    "nvidia": "nvidia.com/gpu",
    "amd": "amd.com/gpu",
    "intel-i915": "gpu.intel.com/i915",
    "intel-xe": "gpu.intel.com/xe",
    "intel-gaudi": "habana.ai/gaudi",
    "google": "google.com/tpu",
    "rebellions-atom": "rebellions.ai/ATOM",
}


def _render(value: Any, values: Mapping[str, Any]) -> Any:
    """Return a value with `{{ .Values.a.b }}` replaced, as the chart renders the model's URI."""

    def look(match: re.Match[str]) -> str:
        return str(Fields(values).look(match.group(1), match.group()))

    return re.sub(r"\{\{-?\s*\.Values\.([\w.]+)\s*-?\}\}", look, value) if isinstance(value, str) else value


def _convert_model_service(fields: Fields, context: Context) -> list[Draft]:
    draft = Draft()
    name = str(fields.take("modelArtifacts.name", ""))
    draft.rename(fields.take("fullnameOverride") or name.rpartition("/")[2], "modelArtifacts.name")
    draft.served_name, draft.origins["model.name"] = name, "modelArtifacts.name"
    uri = str(_render(fields.take("modelArtifacts.uri", ""), fields.data)).replace('"', "")
    if uri.startswith("pvc+hf://"):  # pvc+hf://CLAIM/FOLDER/ORG/NAME
        claim, *_, organisation, short = uri.removeprefix("pvc+hf://").split("/")
        draft.put("model.cache.persistentVolumeClaim.claimName", claim, "modelArtifacts.uri")
        draft.note(
            "modelArtifacts.uri", "the hub's cache is read from hub/ at the root of the claim: move it there, or it is downloaded", uri
        )
        uri = f"hf://{organisation}/{short}"
    draft.put("model.uri", uri, "modelArtifacts.uri")
    if secret := fields.take("modelArtifacts.authSecretName"):
        draft.put("model.secretRef", {"name": secret, "key": "HF_TOKEN"}, "modelArtifacts.authSecretName")
    pod = fields.part("decode")
    apply((Field("replicas", "replicas", whole),), pod, draft)
    created = fields.look("prefill.create", True) and fields.look("prefill.replicas", 1) and fields.look("prefill")
    draft.splits_prefill = bool(created)
    if not created:
        fields.take("prefill")
    for kind, size in (("tensor", "tensor-parallel-size"), ("data", "data-parallel-size")):
        apply((Field(f"parallelism.{kind}", flag(size)),), pod, draft)
    draft.pods = whole(pod.take("parallelism.workers", 1))
    containers = pod.items("containers")
    main = next((one for one in containers if one.look("mountModelVolume") or one.look("modelCommand")), None)
    if main is None:
        raise NotMigratable(f"decode.containers: none has modelCommand or mountModelVolume (got {show(pod.look('containers'))})")
    read_pod(draft, pod, main.path)
    read_container(draft, main, pod)
    words = [*main.take("command", []), *main.take("args", [])]
    read_command(draft, [str(_render(word, fields.data)) for word in words], main.at("args"), serves=True)
    kind = fields.look("decode.accelerator.type") or fields.take("accelerator.type", "nvidia")
    if draft.gpus is None and kind in _ACCELERATORS:
        tensor, local = whole(pod.look("parallelism.tensor", 1)), whole(pod.look("parallelism.dataLocal", 1))
        draft.gpus, draft.origins["resources.gpus"] = tensor * local, "accelerator.type"
        if kind != "nvidia" and not fields.look("accelerator.dra"):
            draft.put("resources.gpuResource", _ACCELERATORS[kind], "accelerator.type")
    if (types := pod.take("acceleratorTypes")) and types.get("labelValues"):
        term = {"key": types["labelKey"], "operator": "In", "values": types["labelValues"]}
        node_terms(draft, [{"matchExpressions": [term]}], pod.at("acceleratorTypes"))
    finish(draft)
    return [draft]


SOURCES = (
    Source(
        "llm-d model service values",
        lambda body: "kind" not in body and "modelArtifacts" in body,
        _convert_model_service,
        _MODEL_SERVICE_REASONS,
    ),
)
