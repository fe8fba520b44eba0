"""KServe: LLMInferenceService (llm-d's too), and InferenceService with a language model. Both have one shape in different places."""

import shlex
from dataclasses import dataclass, field

from fairlead.migrate.command_line import read_arguments
from fairlead.migrate.context import SEVERAL_PODS, Context
from fairlead.migrate.draft import Draft
from fairlead.migrate.fields import Fields, NotMigratable, quantity, reasons, show, whole
from fairlead.migrate.finish import finish
from fairlead.migrate.pods import is_vllm_image, read_container, read_pod
from fairlead.migrate.script import read_command

_ARGUMENTS = "VLLM_ADDITIONAL_ARGS"  # as the command of KServe's templates reads them
_RUNTIMES = ("ServingRuntime", "ClusterServingRuntime")


@dataclass(frozen=True)
class Shape:
    """Where the parts of a kind are. `container`: name of the one that runs vLLM. `flags`: fields that stand for flags of vLLM."""

    pod: str
    container: str
    uri: str
    several_pods: str
    scaling: str
    labels: str
    flags: dict[str, str] = field(default_factory=dict)


LLM = Shape(
    "spec.template",
    "main",
    "spec.model.uri",
    "spec.worker",
    "spec.scaling",
    "spec",
    {
        "spec.model.name": "served-model-name",
        "spec.model.lora.maxRank": "max-lora-rank",
        "spec.model.lora.maxAdapters": "max-loras",
        "spec.model.lora.maxCpuAdapters": "max-cpu-loras",
        "spec.parallelism.tensor": "tensor-parallel-size",
        "spec.parallelism.pipeline": "pipeline-parallel-size",
        "spec.parallelism.data": "data-parallel-size",
    },
)
_SPEC = "spec.predictor"
PREDICTOR = Shape(_SPEC, "kserve-container", f"{_SPEC}.model.storageUri", f"{_SPEC}.workerSpec", _SPEC, _SPEC)


def convert_llm(fields: Fields, context: Context) -> Draft:
    """Return the draft of an LLMInferenceService. Raises NotMigratable."""
    draft, pod, own = _begin(LLM, fields)
    for adapter in fields.items("spec.model.lora.adapters"):
        draft.adapters.append((adapter.need("name"), adapter.need("uri"), adapter.path))
    if (replicas := fields.take("spec.replicas")) is not None:
        draft.put("replicas", whole(replicas), "spec.replicas")
    if fields.take("spec.parallelism.expert"):
        draft.flags.append(("enable-expert-parallel", "", [], "spec.parallelism.expert"))
    for first in fields.items("spec.router.gateway.refs")[:1]:  # a service has one Gateway
        kept = {key: value for key in ("name", "namespace", "sectionName") if (value := first.take(key))}
        draft.put("exposure.gateway.parentRef", kept, first.path)
        if hostnames := fields.take("spec.router.route.http.spec.hostnames"):
            draft.put("exposure.gateway.hostnames", hostnames, "spec.router.route.http.spec.hostnames")
    main = own or Fields({}, f"{pod.path}.containers")
    read_container(draft, main, pod)
    command, source = main.words("command"), main.at("command")
    if not read_command(draft, [*command, *main.words("args")], main.at("args") if main.look("args") else source, serves=not command):
        raise NotMigratable(f"{source} {show(command)} does not start vLLM: write command: [vllm, serve] and its args")
    if more := draft.env.pop(_ARGUMENTS, {}):
        source = f"{main.at('env')} {_ARGUMENTS}"
        try:
            read_arguments(draft, shlex.split(more["value"]), source)
        except (KeyError, ValueError) as error:
            raise NotMigratable(f"{source}: not understood ({error}): write its flags into args") from None
    return _end(LLM, fields, draft)


def convert_predictor(fields: Fields, context: Context) -> Draft:
    """Return the draft of an InferenceService. Raises NotMigratable."""
    draft, pod, own = _begin(PREDICTOR, fields)
    model = pod.part("model")
    form = str(model.take("modelFormat.name", "")).lower()
    if form not in ("huggingface", "vllm", "") or not (form or own):
        what = f"{model.at('modelFormat')} {form}" if form else f"spec.predictor ({', '.join(pod.data) or 'empty'})"
        raise NotMigratable(f"{what}: only language models of format huggingface or vLLM, or a container with vLLM, can be migrated")
    draft.all_gpus = form == "huggingface"
    main = own if own and not form else model
    name = model.look("runtime")
    found = context.find(_RUNTIMES, lambda one: bool(one.look("metadata.name") == name), fields.look("metadata.namespace")) if name else []
    engines = [(main, pod)]
    if found:
        model.take("runtime")
        spec = Fields(found[0].look("spec", {}), f"{found[0].look('kind')} {name} spec")
        draft.beside = (spec, reasons("pod", spec.path, f"{spec.path}.containers") | reasons("runtime", spec.path))
        engines = [*((one, spec) for one in spec.items("containers")[:1]), *engines]
    command: list[str] = []
    args: list[str] = []
    for engine, template in engines:
        read_container(draft, engine, template)
        command = [one.replace("{{.Name}}", draft.served_name) for one in engine.words("command")] or command
        args += [one.replace("{{.Name}}", draft.served_name) for one in engine.words("args")]
    if not read_command(draft, [*command, *args], main.at("args"), serves=not (form or command) and is_vllm_image(main)):
        if not form:
            raise NotMigratable(f"{main.path}: does not run vLLM (image {main.look('image')}): only vLLM can be migrated")
        read_arguments(draft, args, main.at("args"))
    if uri := draft.env.pop("STORAGE_URI", {}).get("value"):
        draft.put("model.uri", uri, f"{draft.origins['engine.env']} STORAGE_URI")
    return _end(PREDICTOR, fields, draft)


def _begin(shape: Shape, fields: Fields) -> tuple[Draft, Fields, Fields | None]:
    """Return the draft with what both kinds have, the section of the pod, and its container that runs vLLM."""
    if fields.look(shape.several_pods):
        raise NotMigratable(f"{shape.several_pods}: {SEVERAL_PODS}")
    draft = Draft(served_name=fields.look("metadata.name"))
    draft.identify(fields)
    if uri := fields.take(shape.uri):
        draft.put("model.uri", str(uri), shape.uri)
    draft.flags += [(flag, "", [quantity(value)], path) for path, flag in shape.flags.items() if (value := fields.take(path)) is not None]
    pod = fields.part(shape.pod)
    containers = pod.items("containers")
    own = next((one for one in containers if one.look("name") == shape.container or len(containers) == 1), None)
    read_pod(draft, pod, own.path if own else "")
    return draft, pod, own


def _end(shape: Shape, fields: Fields, draft: Draft) -> Draft:
    scaling = fields.part(shape.scaling)
    if scaling.look("minReplicas") is not None or scaling.look("maxReplicas") is not None:
        fewest, most = whole(scaling.take("minReplicas", 1)), whole(scaling.take("maxReplicas", 0))
        draft.autoscale(fewest, max(most, fewest, 1), scaling.at("maxReplicas" if most else "minReplicas"), "it scaled by other metrics")
    draft.label_pods(fields, f"{shape.labels}.labels", f"{shape.labels}.annotations")
    finish(draft)
    return draft


LLM_REASONS = reasons("pod", "spec.template", "spec.template.containers") | reasons("LLMInferenceService")
PREDICTOR_REASONS = reasons("pod", *(f"spec.predictor{part}" for part in ("", ".model", ".containers"))) | reasons("predictor")
