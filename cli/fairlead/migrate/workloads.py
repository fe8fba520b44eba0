"""Plain vLLM: a Deployment, StatefulSet or LeaderWorkerSet, with its Service and autoscaler."""

import re
from typing import Any

from fairlead.migrate.command_line import read_command
from fairlead.migrate.draft import Draft
from fairlead.migrate.fields import Fields, whole
from fairlead.migrate.finish import finish
from fairlead.migrate.pods import read_container, read_pod, reasons_of_pod
from fairlead.migrate.sources import METADATA_REASONS, Context, OtherWorkload, Source, is_kind, pod_metadata
from fairlead.migrate.tables import Field, apply

_SUFFIX = "-fairlead"
_TEMPLATES = ("spec.template.spec", "spec.leaderWorkerTemplate.leaderTemplate.spec", "spec.leaderWorkerTemplate.workerTemplate.spec")
_STARTS_VLLM = re.compile(r"\bvllm['\", ]+serve\b|vllm[./]entrypoints[./]")
_ROLLOUT = "set spec.rollout"
_REASONS = {
    **METADATA_REASONS,
    **reasons_of_pod(*_TEMPLATES, *(f"{path}.containers" for path in _TEMPLATES)),
    "spec.strategy": _ROLLOUT,
    "spec.updateStrategy": _ROLLOUT,
    "spec.rolloutStrategy": _ROLLOUT,
    "spec.minReadySeconds": _ROLLOUT,
    "spec.progressDeadlineSeconds": "set spec.rollout.progressDeadlineSeconds",
    "spec.revisionHistoryLimit": "",
    "spec.serviceName": "the operator makes the Services: nothing to do",
    "spec.podManagementPolicy": "workers start in parallel: nothing to do",
    "spec.persistentVolumeClaimRetentionPolicy": "the operator makes no claims: nothing to do",
    "spec.volumeClaimTemplates": "each pod had a claim of its own: name one ReadWriteMany claim in spec.model.cache",
    "spec.startupPolicy": "the operator starts the pods: nothing to do",
    "spec.networkConfig": "the operator connects the pods: nothing to do",
    "spec.leaderWorkerTemplate.workerTemplate": "the leader's template is that of all pods: nothing to do if both are the same",
    "spec.leaderWorkerTemplate.restartPolicy": "a worker restarts as a whole: nothing to do",
    "spec.leaderWorkerTemplate.subGroupPolicy": "the operator places the pods: nothing to do",
}
_WORKLOAD = (Field("spec.replicas", "replicas", whole),)
SCALERS = ("HorizontalPodAutoscaler", "ScaledObject")


def _runs_vllm(container: Fields) -> bool:
    words = [str(word) for word in [*container.look("command", []), *container.look("args", [])]]
    if _STARTS_VLLM.search(" ".join(words)):
        return True
    if container.look("command"):
        return False
    names_model = any(word == "--model" or word.startswith("--model=") for word in words)
    image = str(container.look("image")).partition("@")[0].rpartition("/")[2].partition(":")[0]
    return names_model or ("vllm" in image and (not words or words[0] == "serve" or words[0].startswith("-")))


def _convert(fields: Fields, context: Context) -> list[Draft]:
    kind, name = fields.look("kind"), fields.look("metadata.name")
    template, found = next(((one, main) for one in _templates(fields) if (main := _main(one))), (fields, None))
    if found is None:
        images = [str(one.look("image")) for part in _templates(fields) for one in part.items("spec.containers")]
        sglang = any("sglang" in image for image in images)
        what = "runs SGLang: write its InferenceService by hand (engine.runtime: SGLang)" if sglang else "no container runs vLLM"
        raise OtherWorkload(f"{what} ({', '.join(images) or 'no containers'})")
    draft = Draft()
    draft.identify(fields.look("metadata", {}))
    namespace = fields.look("metadata.namespace")
    if context.find(("Service",), lambda one: Fields(one).look("metadata.name") == draft.name, namespace):
        draft.note(
            "metadata.name", f"Service {draft.name} exists, and the operator makes one of the service's name: it gets {_SUFFIX}", draft.name
        )
        draft.name = draft.name[: 52 - len(_SUFFIX)] + _SUFFIX
    apply(_WORKLOAD, fields, draft)
    draft.pods = whole(fields.take("spec.leaderWorkerTemplate.size", 1))
    pod = template.part("spec")
    read_pod(draft, pod, found.path)
    for claim in fields.items("spec.volumeClaimTemplates"):
        volume = str(claim.look("metadata.name"))
        draft.volumes.setdefault(volume, {"name": volume, "emptyDir": {}})
    read_container(draft, found, pod)
    command, args = found.take("command", []), found.take("args", [])
    read_command(draft, [*command, *args], found.at("args" if args else "command"), serves=not command)
    pod_metadata(draft, template, "metadata.labels", "metadata.annotations", fields.look("spec.selector.matchLabels", {}))
    _scale(draft, kind, name, context, namespace)
    finish(draft)
    return [draft]


def _templates(fields: Fields) -> list[Fields]:
    paths = ("spec.template", "spec.leaderWorkerTemplate.leaderTemplate", "spec.leaderWorkerTemplate.workerTemplate")
    return [part for path in paths if (part := fields.part(path)).data]


def _main(template: Fields) -> Fields | None:
    return next((one for one in template.items("spec.containers") if _runs_vllm(one)), None)


def _scale(draft: Draft, kind: Any, name: Any, context: Context, namespace: Any) -> None:
    """Read the HorizontalPodAutoscaler or ScaledObject of the workload."""

    def is_target(one: Any) -> bool:
        target = Fields(one).look("spec.scaleTargetRef", {})
        return bool(target.get("name") == name and target.get("kind", "Deployment") == kind)

    for scaler in context.find(SCALERS, is_target, namespace):
        keda = scaler.look("kind") == "ScaledObject"
        fewest = scaler.look("spec.minReplicaCount", 0) if keda else scaler.look("spec.minReplicas", 1)
        most = scaler.look("spec.maxReplicaCount", 100) if keda else scaler.look("spec.maxReplicas", 1)
        source = f"{scaler.look('kind')} {scaler.look('metadata.name')}"
        metrics = scaler.look("spec.triggers", []) if keda else scaler.look("spec.metrics", [])
        scaled_by = ", ".join(dict.fromkeys(str(one.get("type")) for one in metrics)) or "CPU"
        draft.autoscale((whole(fewest), whole(most)), source, f"it scaled by {scaled_by}: delete it")


SOURCES = (
    Source("Deployment", is_kind("apps", "Deployment", "StatefulSet"), _convert, _REASONS),
    Source("LeaderWorkerSet", is_kind("leaderworkerset.x-k8s.io", "LeaderWorkerSet"), _convert, _REASONS),
)
