"""KServe: LLMInferenceService, and InferenceService with a language model."""

import shlex
from collections.abc import Mapping
from typing import Any

from fairlead.migrate.command_line import read_arguments, read_command
from fairlead.migrate.draft import Draft
from fairlead.migrate.fields import Fields, NotMigratable, show, whole
from fairlead.migrate.finish import finish
from fairlead.migrate.pods import read_container, read_pod, reasons_of_pod
from fairlead.migrate.sources import METADATA_REASONS, Context, Source, is_kind, pod_metadata, read_gateway
from fairlead.migrate.tables import Field, apply, flag, switches

ARGUMENTS = "VLLM_ADDITIONAL_ARGS"


def _serve_as(draft: Draft, value: Any, source: str) -> None:
    draft.served_name, draft.origins["model.name"] = str(value), source


LLM = (
    Field("spec.model.uri", "model.uri", str),
    Field("spec.model.name", _serve_as),
    Field("spec.model.lora.maxRank", flag("max-lora-rank")),
    Field("spec.model.lora.maxAdapters", flag("max-loras")),
    Field("spec.model.lora.maxCpuAdapters", flag("max-cpu-loras")),
    Field("spec.replicas", "replicas", whole),
    Field("spec.parallelism.tensor", flag("tensor-parallel-size")),
    Field("spec.parallelism.pipeline", flag("pipeline-parallel-size")),
    Field("spec.parallelism.data", flag("data-parallel-size")),
    Field("spec.parallelism.expert", switches("enable-expert-parallel")),
    Field("spec.router.route.http.spec.hostnames", "exposure.gateway.hostnames"),
)
_GATEWAY = "name your Gateway in spec.exposure.gateway.parentRef: KServe's default one is not known here"
_INDEX = "routers route by prefix without a scheduler (spec.routing): nothing to do"
_LLM_REASONS = {
    **METADATA_REASONS,
    **reasons_of_pod("spec.template", "spec.template.containers"),
    "spec.router.gateway": _GATEWAY,
    "spec.router.route": _GATEWAY,
    "spec.router.gateway.refs": "a service has one Gateway: write an HTTPRoute for each of the others",
    "spec.router.ingress": "write an Ingress to the Service of the InferenceService",
    "spec.router.scheduler": _INDEX,
    "spec.prefill": "a worker computes both prefill and decode: add its replicas to spec.replicas to keep the number of GPUs",
    "spec.worker": "the pods of a worker have one template, that of spec.template: nothing to do if both are the same",
    "spec.parallelism.dataLocal": "each part of data parallelism is a worker: nothing to do",
    "spec.parallelism.dataRPCPort": "each part of data parallelism is a worker: nothing to do",
    "spec.baseRefs": "its fields are not in the input: add those that you need",
    "spec.storageInitializer": "workers download the model themselves: nothing to do",
    "spec.model.confidential": "encrypted models are not supported: decrypt it onto a claim (pvc://)",
    "spec.workload": "see KServe's kvCacheOffloading: add vLLM's --kv-offloading-size to spec.engine.args",
    "spec.kvCacheOffloading": "add vLLM's --kv-offloading-size to spec.engine.args; the prefix index does not follow offloaded blocks",
    "spec.tracing": "tracing is configured for all services in the chart (docs/operate/tracing.md)",
    "spec.rolloutStrategy": "set spec.rollout",
    "spec.scaling": "spec.scaling.target is the only metric: nothing to do",
}


def _convert_llm(fields: Fields, context: Context) -> list[Draft]:
    draft = Draft()
    draft.identify(fields.look("metadata", {}))
    draft.served_name = fields.look("metadata.name")
    draft.splits_prefill = bool(fields.look("spec.prefill"))
    apply(LLM, fields, draft)
    for refs in ("spec.router.route.http.spec.parentRefs", "spec.router.gateway.refs"):
        read_gateway(draft, fields, refs)
    for adapter in fields.items("spec.model.lora.adapters"):
        draft.adapters.append((str(adapter.take("name")), str(adapter.take("uri")), adapter.path))
    if fields.look("spec.scaling.maxReplicas") is not None:
        bounds = (whole(fields.take("spec.scaling.minReplicas", 1)), whole(fields.take("spec.scaling.maxReplicas")))
        draft.autoscale(bounds, "spec.scaling", "it scaled by other metrics")
    pod_metadata(draft, fields, "spec.labels", "spec.annotations")
    pod = fields.part("spec.template")
    containers = pod.items("containers")
    main = next((one for one in containers if one.look("name") == "main"), containers[0] if len(containers) == 1 else Fields({}))
    read_pod(draft, pod, main.path)
    read_container(draft, main, pod)
    words = [*main.take("command", []), *main.take("args", [])]
    if not read_command(draft, words, main.at("args"), serves=True):
        draft.note(main.at("command"), "not understood as vLLM's command line: write its flags into spec.engine.args", words)
    read_extra_arguments(draft)
    if fields.look("spec.worker"):
        data, local = (whole(fields.look(f"spec.parallelism.{name}", 1)) for name in ("data", "dataLocal"))
        draft.pods = max(whole(fields.look("spec.parallelism.pipeline", 1)), data // max(1, local))
    finish(draft)
    return [draft]


def read_extra_arguments(draft: Draft) -> None:
    """Read the variable with more arguments, as KServe's command does."""
    variable = draft.env.pop(ARGUMENTS, {})
    if "value" in variable:
        source = f"{draft.origins['engine.env']} {ARGUMENTS}"
        try:
            read_arguments(draft, shlex.split(variable["value"]), source)
        except ValueError as error:
            raise NotMigratable(f"{source}: not understood ({error}): correct its quotes") from None
    elif variable:
        draft.note(ARGUMENTS, "its value is not in the manifest: write its flags into spec.engine.args", variable)


PREDICTOR = (Field("model.storageUri", "model.uri", str),)
_RUNTIME_FIELDS = ("supportedModelFormats", "multiModel", "protocolVersions", "builtInAdapter", "disabled", "annotations", "labels")
_SERVER = "a flag of KServe's server, not of vLLM: nothing to do"
_SERVER_FLAGS = {
    **dict.fromkeys(("http-port", "grpc-port", "workers", "max-threads", "max-asyncio-workers", "enable-grpc"), _SERVER),
    **dict.fromkeys(("enable-docs-url", "enable-latency-logging", "configure-logging", "log-config-file", "access-log-format"), _SERVER),
    **dict.fromkeys(("model-dir", "enable-sigterm-handler", "predictor-host", "predictor-protocol", "predictor-use-ssl"), _SERVER),
    **dict.fromkeys(("disable-lower-case", "disable-special-tokens", "tensor-input-names", "return-token-type-ids"), _SERVER),
    **dict.fromkeys(("return-probabilities", "return-raw-logits", "max-length"), _SERVER),
    "backend": "the engine is vLLM; without it KServe may have used transformers: compare answers",
    "task": "vLLM detects the task; see its --runner and --convert",
}
_SERVER_NAMES = {"model-name": "served-model-name", "model-id": "model", "model-revision": "revision"}
_STOPS = "spec.scaling.target is the only metric: nothing to do"
_PREDICTOR_REASONS = {
    **METADATA_REASONS,
    **reasons_of_pod("spec.predictor", "spec.predictor.model", "spec.predictor.containers"),
    "spec.transformer": "no pods before or after the model: keep it as a Deployment that calls the service",
    "spec.explainer": "no pods before or after the model: keep it as a Deployment that calls the service",
    "spec.predictor.model.runtime": "image and flags of the ServingRuntime are not in the input: check spec.engine.image and args",
    "spec.predictor.model.runtimeVersion": "name the image in spec.engine.image",
    "spec.predictor.model.protocolVersion": "workers serve OpenAI's API; clients of KServe's own protocol must change",
    "spec.predictor.model.storage": "name the model in storageUri, and its Secret in spec.model.secretRef",
    "spec.predictor.scaleTarget": _STOPS,
    "spec.predictor.scaleMetric": _STOPS,
    "spec.predictor.scaleMetricType": _STOPS,
    "spec.predictor.autoScaling": _STOPS,
    "spec.predictor.containerConcurrency": "set spec.engine.maxNumSeqs; routers queue the other requests",
    "spec.predictor.timeout": "set spec.exposure.gateway.timeoutSeconds, or the clients' timeout",
    "spec.predictor.canaryTrafficPercent": "set spec.rollout.canary.trafficPercent",
    "spec.predictor.deploymentStrategy": "set spec.rollout",
    "spec.predictor.workerSpec": "the pods of a worker have one template: nothing to do if both are the same",
    "spec.predictor.logger": "routers log requests; prompts and answers are not logged",
    "spec.predictor.batcher": "the engine batches continuously: nothing to do",
}


def _convert_predictor(fields: Fields, context: Context) -> list[Draft]:
    draft = Draft()
    draft.identify(fields.look("metadata", {}))
    draft.served_name = fields.look("metadata.name")
    pod, model = fields.part("spec.predictor"), fields.part("spec.predictor.model")
    containers = pod.items("containers")
    form = str(model.take("modelFormat.name", "")).lower()
    if form not in ("huggingface", "vllm", "") or not (form or containers):
        what = f"spec.predictor.model.modelFormat {form}" if form else f"spec.predictor ({', '.join(pod.keys()) or 'empty'})"
        raise NotMigratable(f"{what}: only language models of format huggingface or vLLM, or a container with vLLM, can be migrated")
    own = next((one for one in containers if one.look("name") == "kserve-container"), None if form else containers[0])
    main = own if own and not form else model
    apply(PREDICTOR, pod, draft)
    read_pod(draft, pod, own.path if own else "")
    command, args = main.take("command", []), main.take("args", [])
    if form:
        runtime = _read_runtime(draft, model, context, fields.look("metadata"))
        command, args = command or runtime[0], [*runtime[1], *args]
    read_container(draft, main, pod)
    if form:
        draft.all_gpus = form == "huggingface"
        if not (command and read_command(draft, [*command, *args], main.at("args"))):
            read_arguments(draft, args, main.at("args"))
        draft.flags = [(_SERVER_NAMES.get(name, name), *rest) for name, *rest in draft.flags]  # type: ignore[misc]
        for name, written, values, source in [one for one in draft.flags if one[0] in _SERVER_FLAGS]:
            draft.note(f"{source} {written}", _SERVER_FLAGS[name], " ".join(values) or None)
            draft.flags.remove((name, written, values, source))
    elif not read_command(draft, [*command, *args], main.at("args"), serves="vllm" in str(main.look("image"))):
        raise NotMigratable(f"{main.path}: does not run vLLM (image {main.look('image')}): only vLLM can be migrated")
    if uri := draft.env.pop("STORAGE_URI", {}).get("value"):
        draft.put("model.uri", uri, f"{draft.origins['engine.env']} STORAGE_URI")
    if draft.get("model.uri") is None and not any(one[0] == "model" for one in draft.flags) and (storage := model.look("storage")):
        raise NotMigratable(f"{model.at('storage')} {show(storage)}: {_PREDICTOR_REASONS['spec.predictor.model.storage']}")
    _scale_predictor(draft, pod)
    if pod.look("workerSpec"):
        draft.pods = whole(pod.look("workerSpec.pipelineParallelSize", 2))
        table = (Field("tensorParallelSize", flag("tensor-parallel-size")), Field("pipelineParallelSize", flag("pipeline-parallel-size")))
        apply(table, pod.part("workerSpec"), draft)
    pod_metadata(draft, pod, "labels", "annotations")
    finish(draft)
    return [draft]


def _read_runtime(draft: Draft, model: Fields, context: Context, metadata: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Read the container of the ServingRuntime, if it is in the input; return its command and arguments."""
    kinds, name = ("ServingRuntime", "ClusterServingRuntime"), model.look("runtime")
    found = context.find(kinds, lambda one: Fields(one).look("metadata.name") == name, metadata.get("namespace")) if name else []
    for runtime in found[:1]:
        model.take("runtime")
        where = f"{runtime.look('kind')} {name} "
        spec = Fields(runtime.look("spec", {}), f"{where}spec")
        for container in spec.items("containers")[:1]:
            read_container(draft, container, spec)
            words = [[str(one).replace("{{.Name}}", metadata["name"]) for one in container.take(part, [])] for part in ("command", "args")]
            silent = dict.fromkeys((f"{where}spec.{one}" for one in _RUNTIME_FIELDS), "")
            for path, value, reason in spec.left({**reasons_of_pod(f"{where}spec", f"{where}spec.containers"), **silent}):
                draft.note(path, reason, value)
            return words[0], words[1]
    return [], []


def _scale_predictor(draft: Draft, pod: Fields) -> None:
    fewest, most = whole(pod.take("minReplicas", 1)), whole(pod.take("maxReplicas", 0))
    source = pod.at("maxReplicas" if most else "minReplicas")
    if fewest == 0 or most > fewest:
        draft.autoscale((fewest, max(most, 1)), source, "it scaled by requests or CPU")
    else:
        draft.put("replicas", fewest, source)


SOURCES = (
    Source("LLMInferenceService", is_kind("serving.kserve.io", "LLMInferenceService"), _convert_llm, _LLM_REASONS),
    Source("InferenceService of KServe", is_kind("serving.kserve.io", "InferenceService"), _convert_predictor, _PREDICTOR_REASONS),
)
