"""What no single field says: the model's URI, its cache, the GPUs of a worker, the engine, and the pod template. Pure."""

import re

from pydantic import ValidationError

from fairlead.migrate.command_line import carry_flags
from fairlead.migrate.draft import Draft
from fairlead.migrate.fields import NotMigratable
from fairlead.migrate.pods import keep_volume
from fairlead_operator.api.model import Model

_HUB_CACHE = re.compile(r"/root|(/root|/home/[^/]+)?/\.cache(/huggingface(/hub)?)?")
"""Folders of an image that hold the cache of the hub."""
_KSERVE_MOUNT = "/mnt/models"
_SCHEMES = ("hf", "s3", "gs", "pvc", "oci", "file")
_OTHER_SCHEME = "copy the model to a claim (pvc://CLAIM/PATH) or name it on the hub (hf://ORG/NAME)"
_BUCKETS = ("s3://", "gs://")


def finish(draft: Draft) -> None:
    """Complete the draft. Raises NotMigratable."""
    carry_flags(draft)
    _set_model(draft)
    _set_name(draft)
    _set_cache(draft)
    _set_gpus(draft)
    runtime = _choose_runtime(draft)
    draft.spec["engine"] = {"runtime": runtime, **draft.spec.get("engine", {})}
    if draft.env:
        draft.spec["engine"]["env"] = list(draft.env.values())
    _set_pod_template(draft, *(("initContainers", "engine") if runtime == "VLLM" else ("containers", "worker")))


def _set_model(draft: Draft) -> None:
    (named, named_at), uri = draft.model, draft.get("model.uri")
    source = named_at if uri is None else draft.origins["model.uri"]
    if uri is None and not named:
        raise NotMigratable("no field names a model, and vLLM's default model depends on its version: add --model")
    if uri is None or "://" in uri:
        uri = to_uri(draft, uri or named)
    if source != named_at and named and not named.startswith(_KSERVE_MOUNT) and to_uri(draft, named) != uri:
        draft.note(named_at, f"{source} is used instead", named)
    scheme = uri.partition("://")[0]
    if scheme not in _SCHEMES:
        raise NotMigratable(f"{source}: {uri!r}: {_OTHER_SCHEME}")
    if scheme == "hf" and ":" in uri[5:] and source == named_at:
        raise NotMigratable(f"{source}: {named!r} names a quantization: set spec.model.uri to the file, hf://ORG/NAME/FILE.gguf, by hand")
    if scheme == "hf" and ":" in uri[5:]:  # KServe's hf://ORG/NAME:REVISION
        uri, _, revision = uri.rpartition(":")
        draft.put("model.revision", revision, source)
    if scheme == "oci" and "#" not in uri:
        uri += "#models"  # the folder of KServe's model images
        draft.note(source, "spec.model.uri names folder /models of the image, as KServe has it: change what follows # for another", uri)
    draft.put("model.uri", uri, source)
    if scheme != "hf" and (secret := draft.spec["model"].pop("secretRef", None)):
        draft.env.setdefault("HF_TOKEN", {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": secret}})
    if scheme != "hf" and (revision := draft.spec["model"].pop("revision", None)):
        draft.note(draft.origins["model.revision"], "only models of the hub have a revision", revision)
    if draft.adapters:
        draft.put("model.adapters", [{"name": name, "uri": to_uri(draft, path)} for name, path, _ in draft.adapters], draft.adapters[0][2])


def to_uri(draft: Draft, model: str) -> str:
    """Return the URI of a model as vLLM names it: of the hub, or a path on a volume of the container."""
    if ".." in model.split("/")[1:]:
        raise NotMigratable(f"{model!r} has a step '..': write the path without it")
    if "://" in model:
        return model
    if not model.startswith(("/", ".", "~")):
        return f"hf://{model}"
    path = next((one for one in sorted(draft.mounts, key=len, reverse=True) if f"{model}/".startswith(f"{one}/")), None)
    if path is None:
        return f"file://{model}"
    volume, mount = draft.mounts[path]
    if folder := mount.get("subPathExpr"):
        raise NotMigratable(f"volume {mount.get('name')}: subPathExpr {folder!r} has a value for each pod: write the folder as subPath")
    inside = "/".join(part.strip("/") for part in (str(mount.get("subPath", "")), model[len(path) :]) if part.strip("/"))
    claim, image = ((volume.get(kind) or {}).get(name) for kind, name in (("persistentVolumeClaim", "claimName"), ("image", "reference")))
    if claim or image:
        draft.replaced.add(path)
    return f"pvc://{claim}/{inside}".rstrip("/") if claim else f"oci://{image}#{inside}" if image else f"file://{model}"


def _set_name(draft: Draft) -> None:
    """Set the name that clients send: vLLM's default is the model as its command line names it."""
    name, source = draft.served_name or draft.model[0], draft.origins.get("model.name", draft.model[1])
    if not name or name == draft.name or draft.get("model.name"):
        return
    try:
        Model.model_validate({"uri": "hf://a/b", "name": name})
    except ValidationError:
        draft.note(source, f"not allowed as a name: clients send {draft.name} instead", name)
    else:
        draft.put("model.name", name, source)


def _set_cache(draft: Draft) -> None:
    """Make the volume of the hub's cache that of `spec.model.cache`, whose root the operator sets as HF_HOME."""
    hubs = draft.cache_paths
    path = next((one for one in draft.mounts if any(f"{hub}/".startswith(f"{one}/") for hub in hubs)), None)
    path = path or next((one for one in draft.mounts if _HUB_CACHE.fullmatch(one)), None)
    if path is None or not draft.get("model.uri").startswith(("hf://", *_BUCKETS)) or draft.get("model.cache"):
        return
    volume, mount = draft.mounts[path]
    is_home = (f"{path}/hub" in hubs or path.endswith("/huggingface")) and not {"subPath", "subPathExpr"} & mount.keys()
    source, found = f"volume {mount.get('name')}", "found there" if is_home else "downloaded again"
    draft.replaced.add(path)
    for kind, name in (("persistentVolumeClaim", "claimName"), ("hostPath", "path"), ("emptyDir", "sizeLimit")):
        if value := (volume.get(kind) or {}).get(name):
            draft.put(f"model.cache.{kind}.{name}", str(value), source)
            if kind != "emptyDir":
                draft.note(source, f"it must exist and be writable for group 65532; what the old pods downloaded is {found}")
            break
    else:
        if "emptyDir" not in volume:
            draft.note(source, "no volume for spec.model.cache, so each pod downloads the model: name a claim there", volume)


def _set_gpus(draft: Draft) -> None:
    """Set GPUs and replicas from the degrees of parallelism."""
    (tensor, at), (stages, stages_at), (data, data_at) = (draft.parallel.get(name, (1, "")) for name in ("tensor", "pipeline", "data"))
    gpus_at = draft.origins.get("resources.gpus", at)
    if "tensor" not in draft.parallel and draft.all_gpus:
        tensor, at = max(1, (draft.gpus or 1) // (stages * data)), gpus_at
    if stages > 1:
        draft.spec.setdefault("engine", {}).setdefault("args", []).append(f"--pipeline-parallel-size={stages}")
        draft.origins.setdefault("engine.args", stages_at)
    if data > 1:
        text = f"each of the {data} parts is a worker, so the number of replicas is multiplied"
        draft.note(data_at, f"{text}; CPU and memory of the old pod were for all", data)
        if scaling := draft.get("scaling"):
            scaling.update({name: scaling[name] * data for name in ("minReplicas", "maxReplicas")})
        else:
            draft.spec["replicas"] = draft.spec.get("replicas", 1) * data
            draft.origins.setdefault("replicas", data_at)
    gpus = tensor * stages
    if not draft.gpus and gpus == 1:
        gpus = 0
        draft.note("resources", "no GPU is requested: the workers run on CPUs (spec.resources.gpus: 0)")
    if draft.gpus and draft.gpus != gpus * data:
        text = f"a replica uses {gpus}, so spec.resources.gpus is {gpus}: to use more, raise spec.engine.tensorParallel too"
        draft.note(gpus_at, text, draft.gpus)
    if tensor > 1:
        draft.put("engine.tensorParallel", tensor, stages_at or at or gpus_at)
    draft.put("resources.gpus", gpus, gpus_at or stages_at or at or "resources")


def _choose_runtime(draft: Draft) -> str:
    """Return the runtime: vLLM, or Fairlead's engine for a model in a bucket, without what is vLLM's."""
    uris = [(draft.get("model.uri"), draft.origins["model.uri"]), *((to_uri(draft, path), at) for _, path, at in draft.adapters)]
    bucket = next((one for one in uris if one[0].startswith(_BUCKETS)), None)
    if bucket is None:
        if not draft.get("engine.image"):
            on_cpus = " and runs on CPUs" if draft.get("resources.gpus") == 0 else ""
            draft.note(
                "spec.engine.image", f"absent in the source, so the chart's images.vllm runs: check that it knows the flags{on_cpus}"
            )
        return "VLLM"
    text = f"only Fairlead's engine downloads from buckets ({bucket[0]}), so spec.engine.runtime is Fairlead"
    draft.note(bucket[1], f"{text}: check that it serves the model (docs/guides/models.md), or copy the model to a claim (pvc://)")
    for name in ("image", "args"):
        if value := draft.spec.get("engine", {}).pop(name, None):
            draft.note(draft.origins[f"engine.{name}"], "of vLLM, not for runtime Fairlead", value)
    for name in [name for name in draft.env if name.startswith("VLLM_")]:
        draft.note(draft.origins["engine.env"], "a variable of vLLM is not for runtime Fairlead", draft.env.pop(name))
    return "Fairlead"


def _set_pod_template(draft: Draft, kind: str, engine: str) -> None:
    """Put what has no field of its own into `spec.podTemplate`. `engine`: name of the engine's container, in the list `kind`."""
    for path, (volume, mount) in draft.mounts.items():
        if path in draft.replaced:
            continue
        draft.container.setdefault("volumeMounts", []).append({**mount, "name": volume["name"]})
        keep_volume(draft, volume)
        if "persistentVolumeClaim" in volume or "hostPath" in volume:
            draft.note(f"volume {mount.get('name')}", "mounted as before; workers read and write it as user 65532")
    if draft.container:
        draft.pod.setdefault(kind, []).append({"name": engine, **draft.container})
    if draft.pod:
        draft.spec.setdefault("podTemplate", {})["spec"] = draft.pod
