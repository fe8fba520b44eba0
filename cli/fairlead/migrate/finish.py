"""What no single field says: the model's URI, its cache, the GPUs of a worker, the engine, and the pod template. Pure."""

import re

from pydantic import ValidationError

from fairlead.migrate.command_line import carry_flags
from fairlead.migrate.draft import Draft
from fairlead.migrate.fields import NotMigratable
from fairlead_operator.api.spec import Model

_HUB_CACHES = ("/root/.cache/huggingface", "/.cache/huggingface")
_KSERVE_MOUNT = "/mnt/models"
_OWN_VOLUMES = re.compile(r"^(tmp|shm|cache|model|draft|agent-tmp|adapter-\d+)$")
_SOURCES = {
    "ollama": "Ollama's own format is not served: name the model's safetensors (hf://), or a .gguf file of the hub with runtime Fairlead",
    "http": "copy the model to a claim (pvc://CLAIM/PATH) or name it on the hub (hf://ORG/NAME)",
    "pvc+hf": "write hf://ORG/NAME, and the claim in spec.model.cache",
}
_BUCKETS = ("s3://", "gs://")


def finish(draft: Draft) -> None:
    """Complete the draft. Raises NotMigratable."""
    carry_flags(draft)
    _set_model(draft)
    _set_names(draft)
    _set_cache(draft)
    _set_gpus(draft)
    gateway = draft.get("exposure.gateway")
    if gateway and "parentRef" not in gateway:
        del draft.spec["exposure"]["gateway"]
        draft.note(
            draft.origins["exposure.gateway.hostnames"], "name your Gateway in spec.exposure.gateway.parentRef too", gateway["hostnames"]
        )
    runtime = _choose_runtime(draft)
    draft.spec["engine"] = {"runtime": runtime, **draft.spec.get("engine", {})}
    if runtime == "VLLM" and not draft.get("engine.image"):
        on_cpus = " and runs on CPUs" if draft.get("resources.gpus") == 0 else ""
        draft.note("spec.engine.image", f"absent in the source, so the chart's images.vllm runs: check that it knows the flags{on_cpus}")
    if draft.env:
        draft.spec["engine"]["env"] = list(draft.env.values())
    _set_pod_template(draft, "engine" if runtime == "VLLM" else "worker")


def _set_model(draft: Draft) -> None:
    said = draft.model
    explicit = draft.get("model.uri")
    if explicit is None and not said:
        raise NotMigratable("no field names a model, and vLLM's default model depends on its version: add --model")
    if explicit is not None and said and not said.startswith(_KSERVE_MOUNT) and to_uri(draft, said) != explicit:
        draft.note(draft.model_source, f"{draft.origins['model.uri']} is used instead", said)
    uri = to_uri(draft, said) if explicit is None else explicit
    source = draft.model_source if explicit is None else draft.origins["model.uri"]
    scheme = uri.partition("://")[0]
    problem = _SOURCES.get("http" if scheme in ("http", "https") else scheme)
    if problem or scheme not in ("hf", "s3", "gs", "pvc", "oci", "file"):
        raise NotMigratable(f"{source}: {uri!r}: {problem or _SOURCES['http']}")
    if scheme == "hf" and ":" in uri[5:]:  # KServe's hf://ORG/NAME:REVISION
        uri, _, revision = uri.rpartition(":")
        draft.put("model.revision", revision, source)
    if scheme == "oci" and "#" not in uri:
        uri += "#models"  # the folder of KServe's model images
        draft.note(source, "spec.model.uri names folder /models of the image, as KServe has it: change what follows # for another", uri)
    draft.put("model.uri", uri, source)
    if (secret := draft.get("model.secretRef")) and scheme != "hf":
        draft.spec["model"].pop("secretRef")
        draft.env.setdefault("HF_TOKEN", {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": secret}})
    if draft.get("model.revision") and scheme != "hf":
        draft.note(draft.origins["model.revision"], "only models of the hub have a revision", draft.spec["model"].pop("revision"))
    if draft.adapters:
        draft.put("model.adapters", [{"name": name, "uri": to_uri(draft, path)} for name, path, _ in draft.adapters], draft.adapters[0][2])


def to_uri(draft: Draft, model: str) -> str:
    """Return the URI of a model as vLLM names it: of the hub, or a path on a volume of the container."""
    if "://" in model:
        return model
    if not model.startswith(("/", ".", "~")):
        return f"hf://{model}"
    for path in sorted(draft.mounts, key=len, reverse=True):
        if model != path and not model.startswith(f"{path}/"):
            continue
        volume, folder = draft.mounts[path]
        inside = "/".join(part.strip("/") for part in (folder, model[len(path) :]) if part.strip("/"))
        if claim := (volume.get("persistentVolumeClaim") or {}).get("claimName"):
            draft.mount_specs.pop(path, None)
            return f"pvc://{claim}/{inside}".rstrip("/")
        if reference := (volume.get("image") or {}).get("reference"):
            draft.mount_specs.pop(path, None)
            return f"oci://{reference}#{inside}"
        break
    return f"file://{model}"


def _set_names(draft: Draft) -> None:
    """Set the name that clients send: vLLM's default is the model as its command line names it."""
    name = draft.served_name or draft.model
    if not name or name == draft.name or draft.get("model.name"):
        return
    try:
        Model.model_validate({"uri": "hf://a/b", "name": name})
    except ValidationError:
        draft.note(draft.origins.get("model.name", draft.model_source), f"not allowed as a name: clients send {draft.name} instead", name)
        return
    draft.put("model.name", name, draft.origins.get("model.name", draft.model_source))


def _set_cache(draft: Draft) -> None:
    """Make the volume of the hub's cache that of `spec.model.cache`, whose root the operator sets as HF_HOME."""
    homes = {*draft.cache_paths, *_HUB_CACHES}
    for path in [one for one in draft.mount_specs if any(home == one or home.startswith(f"{one}/") for home in homes)]:
        volume, folder = draft.mounts[path]
        claim, host, empty = (volume.get(name) or {} for name in ("persistentVolumeClaim", "hostPath", "emptyDir"))
        source = f"volume {volume.get('name')}"
        if not draft.get("model.uri").startswith(("hf://", *_BUCKETS)) or draft.get("model.cache"):
            continue
        del draft.mount_specs[path]
        found = "found there" if path in homes and not folder else "downloaded again"
        if claim:
            draft.put("model.cache.persistentVolumeClaim.claimName", claim.get("claimName"), source)
            draft.note(source, f"make its root writable for group 65532; what the old pods downloaded is {found}")
        elif host:
            draft.put("model.cache.hostPath.path", host.get("path"), source)
            draft.note(source, f"the folder must exist on each node, writable for group 65532; what the old pods downloaded is {found}")
        elif empty.get("sizeLimit"):
            draft.put("model.cache.emptyDir.sizeLimit", str(empty["sizeLimit"]), source)


def _set_gpus(draft: Draft) -> None:
    """Set GPUs, nodes and replicas from the degrees of parallelism. A worker has tensor parallelism only."""
    (tensor, at), (pipeline, pipeline_at), (data, data_at) = (draft.parallel.get(name, (1, "")) for name in ("tensor", "pipeline", "data"))
    if "tensor" not in draft.parallel and draft.all_gpus and draft.pods == 1:
        tensor, at = max(1, (draft.gpus or 1) // (pipeline * data)), draft.origins.get("resources.gpus", "")
    total, source = tensor * pipeline, pipeline_at or at
    if pipeline > 1:
        text = f"no pipeline parallelism: spec.engine.tensorParallel is {total}, which must divide the model's heads"
        draft.note(pipeline_at, text, pipeline)
    if data > 1:
        _multiply_replicas(draft, data, data_at)
    nodes = 1
    if draft.pods > 1 and (draft.gpus is None or total > draft.gpus) and total % draft.pods == 0:
        nodes = draft.pods
        draft.put("engine.nodes", nodes, source)
    gpus = total // nodes
    if draft.get("resources.resourceClaims"):
        gpus_source = draft.origins["resources.resourceClaims"]
    else:
        gpus_source = draft.origins.get("resources.gpus", source)
        if not draft.gpus and total == 1:
            gpus = 0
            draft.note("resources", "no GPU is requested: the workers run on CPUs (spec.resources.gpus: 0)")
    if draft.gpus and draft.gpus != gpus * (data if draft.pods == 1 else 1):
        text = f"a replica uses {gpus}, so spec.resources.gpus is {gpus}: to use more, raise spec.engine.tensorParallel too"
        draft.note(gpus_source, text, draft.gpus)
    if total > 1:
        draft.put("engine.tensorParallel", total, source or gpus_source)
    draft.put("resources.gpus", gpus, gpus_source or "resources")


def _multiply_replicas(draft: Draft, data: int, source: str) -> None:
    """Make a worker of each part of data parallelism."""
    if scaling := draft.get("scaling"):
        scaling.update({name: scaling[name] * data for name in ("minReplicas", "maxReplicas")})
    else:
        draft.spec["replicas"] = draft.spec.get("replicas", 1) * data
        draft.origins.setdefault("replicas", source)
    text = f"each of the {data} parts is a worker, so the number of replicas is multiplied; CPU and memory of the old pod were for all"
    draft.note(source, text, data)


def _choose_runtime(draft: Draft) -> str:
    """Return VLLM, or Fairlead for what only Fairlead's engine does. Its flags and image differ."""
    uris = [(draft.get("model.uri"), draft.origins["model.uri"]), *((to_uri(draft, path), at) for _, path, at in draft.adapters)]
    bucket, where = next(((uri, at) for uri, at in uris if uri.startswith(_BUCKETS)), (None, ""))
    nodes = draft.get("engine.nodes") or 1
    if bucket is None and nodes == 1:
        return "VLLM"
    why = f"only Fairlead's engine downloads from buckets ({bucket})" if bucket else f"only Fairlead's engine spans {nodes} pods"
    instead = "copy the model to a claim (pvc://)" if bucket else "use the GPUs of one node"
    draft.note(
        where or draft.origins["engine.nodes"],
        f"{why}, so spec.engine.runtime is Fairlead: check that it serves the model (docs/guides/models.md), or {instead}",
    )
    engine = draft.spec.get("engine", {})
    for name in ("image", "args"):
        for value in [engine.pop(name)] if engine.get(name) else []:
            draft.note(draft.origins[f"engine.{name}"], "of vLLM, not for runtime Fairlead", value)
    for name in [name for name in draft.env if name.startswith("VLLM_")]:
        draft.note(draft.origins["engine.env"], "a variable of vLLM is not for runtime Fairlead", draft.env.pop(name))
    return "Fairlead"


def _set_pod_template(draft: Draft, engine: str) -> None:
    """Put what has no field of its own into `spec.podTemplate`."""
    for path, mount in draft.mount_specs.items():
        volume = dict(draft.mounts[path][0])
        name = str(volume["name"])
        if _OWN_VOLUMES.match(name):
            volume["name"] = f"own-{name}"
        draft.container.setdefault("volumeMounts", []).append({**mount, "name": volume["name"]})
        if volume not in draft.pod.setdefault("volumes", []):
            draft.pod["volumes"].append(volume)
        if "persistentVolumeClaim" in volume or "hostPath" in volume:
            draft.note(f"volume {name}", "mounted as before; workers read and write it as user 65532")
    if draft.container:
        where = "initContainers" if engine == "engine" else "containers"
        draft.pod.setdefault(where, []).append({"name": engine, **draft.container})
    if draft.pod:
        draft.spec.setdefault("podTemplate", {})["spec"] = draft.pod
