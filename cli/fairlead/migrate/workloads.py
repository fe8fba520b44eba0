"""Plain vLLM: a Deployment or StatefulSet, with its Service and autoscaler."""

import re
from typing import Any

from fairlead.migrate.command_line import are_arguments
from fairlead.migrate.context import Context, OtherWorkload
from fairlead.migrate.draft import Draft
from fairlead.migrate.fields import Fields, NotMigratable, reasons, whole
from fairlead.migrate.finish import finish
from fairlead.migrate.pods import is_vllm_image, read_container, read_pod
from fairlead.migrate.script import read_command

_SUFFIX = "-fairlead"
_STARTS_VLLM = re.compile(r"\bvllm['\",\s\\]+serve\b|vllm[./]entrypoints[./]")


def _words(container: Fields) -> list[str]:
    return [str(word) for word in [*container.look("command", []), *container.look("args", [])]]


def _starts_vllm(container: Fields) -> bool:
    return _STARTS_VLLM.search(" ".join(_words(container))) is not None


def convert_workload(fields: Fields, context: Context) -> Draft:
    """Return the draft of a Deployment or StatefulSet. Raises OtherWorkload and NotMigratable."""
    template = fields.part("spec.template")
    pod = template.part("spec")
    engines = [one for one in pod.items("containers") if _starts_vllm(one)]
    engines = engines or [
        one for one in pod.items("containers") if is_vllm_image(one) and not one.look("command") and are_arguments(_words(one))
    ]
    if not engines:
        images = [str(one.look("image") or "a container without image") for one in pod.items("containers")]
        sglang = any("sglang" in image for image in images)
        what = "runs SGLang: write its InferenceService by hand (engine.runtime: SGLang)" if sglang else "no container runs vLLM"
        raise OtherWorkload(f"{what} ({', '.join(images) or 'no containers'})")
    main = engines[0]
    if engines[1:]:
        names = ", ".join(str(one.look("name")) for one in engines)
        raise NotMigratable(f"{pod.at('containers')}: each of {names} runs vLLM: write an InferenceService for each by hand")
    draft = Draft()
    draft.identify(fields)
    if context.find(("Service",), lambda one: bool(one.look("metadata.name") == draft.name), fields.look("metadata.namespace")):
        text = f"Service {draft.name} exists, and the operator makes one of the service's name: it gets {_SUFFIX}"
        draft.note("metadata.name", text, draft.name)
        draft.name = draft.name[: 52 - len(_SUFFIX)] + _SUFFIX
    if (replicas := fields.take("spec.replicas")) is not None:
        draft.put("replicas", whole(replicas), "spec.replicas")
    claimed = [str(claim.look("metadata.name")) for claim in fields.items("spec.volumeClaimTemplates")]
    draft.volumes = {name: {"name": name, "emptyDir": {}} for name in claimed}
    read_pod(draft, pod, main.path)
    read_container(draft, main, pod)
    source = main.at("args" if main.look("args") else "command")
    if not read_command(draft, [*main.words("command"), *main.words("args")], source, serves=not main.look("command")):
        raise NotMigratable(f"{source} does not start vLLM's server in a way that is known: write command: [vllm, serve] and its args")
    draft.label_pods(template, "metadata.labels", "metadata.annotations", fields.look("spec.selector.matchLabels", {}))
    _scale(draft, fields, context)
    finish(draft)
    return draft


def _scale(draft: Draft, fields: Fields, context: Context) -> None:
    """Read the HorizontalPodAutoscaler or ScaledObject of the workload."""
    target = (fields.look("kind"), fields.look("metadata.name"))

    def is_target(one: Fields) -> bool:
        return (one.look("spec.scaleTargetRef.kind", "Deployment"), one.look("spec.scaleTargetRef.name")) == target

    for scaler in context.find(("HorizontalPodAutoscaler", "ScaledObject"), is_target, fields.look("metadata.namespace")):
        keda = scaler.look("kind") == "ScaledObject"
        names = ("minReplicaCount", "maxReplicaCount", "triggers") if keda else ("minReplicas", "maxReplicas", "metrics")
        defaults: tuple[Any, ...] = (0, 100, []) if keda else (1, 1, [])
        fewest, most, metrics = (scaler.look(f"spec.{name}", default) for name, default in zip(names, defaults, strict=True))
        scaled_by = ", ".join(dict.fromkeys(str(one.get("type")) for one in metrics)) or "CPU"
        source = f"{scaler.look('kind')} {scaler.look('metadata.name')}"
        draft.autoscale(whole(fewest), whole(most), source, f"it scaled by {scaled_by}: delete it")
        for name, value in scaler.look("spec").items():
            if name not in (*names, "scaleTargetRef"):
                draft.note(f"{source} spec.{name}", "the operator decides when to scale (spec.scaling): nothing to do", value)


WORKLOAD_REASONS = reasons("pod", "spec.template.spec", "spec.template.spec.containers") | reasons("workload")
