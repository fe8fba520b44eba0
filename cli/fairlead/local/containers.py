"""From a Deployment's pod template to the command line of one local pod. Pure: dicts in, frozen objects out."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fairlead.errors import UserError
from fairlead_worker.isa import VARIABLE as CPU_LEVEL

LOOPBACK = "127.0.0.1"
_REFERENCE = re.compile(r"\$(\$|\(([A-Za-z_][\w.-]*)\))")


@dataclass(frozen=True)
class Probe:
    """An HTTP probe with its times in seconds."""

    path: str
    port: int
    period: float = 10.0
    timeout: float = 1.0
    failures: int = 3


@dataclass(frozen=True)
class Container:
    """What a local pod runs. `port` is the local port that stands for the container's own."""

    command: tuple[str, ...]
    env: Mapping[str, str]
    port: int
    readiness: Probe | None
    startup: Probe | None
    liveness: Probe | None


@dataclass(frozen=True)
class PodIdentity:
    """What the downward API tells a pod."""

    name: str
    namespace: str
    labels: Mapping[str, str] = field(default_factory=dict)
    ip: str = LOOPBACK

    def field(self, path: str) -> str:
        """The value of a `fieldRef`; UserError for one that has no meaning here."""
        label = re.fullmatch(r"metadata\.labels\['(.+)'\]", path)
        if label:
            return self.labels.get(label[1], "")
        known = {
            "metadata.name": self.name,
            "metadata.namespace": self.namespace,
            "metadata.uid": self.name,
            "status.podIP": self.ip,
            "status.hostIP": self.ip,
            "spec.nodeName": "localhost",
            "spec.serviceAccountName": "default",
        }
        if path not in known:
            raise UserError(f"fieldRef {path}: local mode knows {', '.join(known)} and metadata.labels['…']")
        return known[path]


def expand(text: str, env: Mapping[str, str]) -> str:
    """Kubernetes' `$(VAR)`: known variables are replaced, unknown ones stay, `$$` is a dollar sign."""

    def value(match: re.Match[str]) -> str:
        if match[1] == "$":
            return "$"
        return env.get(match[2], match[0])

    return _REFERENCE.sub(value, text)


def environment(entries: Sequence[Mapping[str, Any]], identity: PodIdentity, host: Mapping[str, str]) -> dict[str, str]:
    """The container's own variables, in order, each able to use the earlier ones.

    A Secret or ConfigMap key is taken from a variable of the same name in `host`, the environment `fairlead up` was started in.
    """
    env: dict[str, str] = {}
    for entry in entries:
        name, source = entry["name"], entry.get("valueFrom") or {}
        if "fieldRef" in source:
            env[name] = identity.field(source["fieldRef"]["fieldPath"])
        elif "secretKeyRef" in source or "configMapKeyRef" in source:
            if name in host:
                env[name] = host[name]
            elif not (source.get("secretKeyRef") or source["configMapKeyRef"]).get("optional"):
                raise UserError(
                    f"the manifest takes {name} from a Secret or ConfigMap: there is none here; set the variable {name} instead"
                )
        elif "resourceFieldRef" not in source:
            env[name] = expand(str(entry.get("value", "")), env)
    return env


def local_container(
    template: Mapping[str, Any],
    identity: PodIdentity,
    *,
    port: int,
    flags: Sequence[str],
    host_env: Mapping[str, str],
    find_program: Callable[[Sequence[str]], Sequence[str]],
    find_path: Callable[[str], str],
) -> Container:
    """The first container of a pod template as a local process.

    `flags` are appended and so override the template's (the last one given wins). `find_program` turns the container's command into
    one that runs on this machine; `find_path` turns a path inside the container into one here.
    `host_env` is inherited underneath the container's own: of Fairlead's variables the CPU level alone, which is the machine's.
    """
    container = template["spec"]["containers"][0]
    inside = _inside_only(template)
    own = environment([entry for entry in container.get("env", ()) if entry.get("value") not in inside], identity, host_env)
    inherited = {name: value for name, value in host_env.items() if name == CPU_LEVEL or not name.startswith("FAIRLEAD_")}
    args = [expand(arg, own) for arg in container.get("args", ())]
    command = find_program([expand(word, own) for word in container.get("command", ())])
    return Container(
        command=(*command, *(localize(arg, find_path) for arg in args), *flags),
        env={**inherited, **own, "PYTHONUNBUFFERED": "1"},
        port=port,
        readiness=_probe(container, "readinessProbe", port),
        startup=_probe(container, "startupProbe", port),
        liveness=_probe(container, "livenessProbe", port),
    )


def localize(arg: str, find_path: Callable[[str], str]) -> str:
    """`--model=file:///mnt/model` and `file:///mnt/model` with the path as it is on this machine; other arguments unchanged."""
    before, scheme, path = arg.partition("file://")
    if not scheme or (before and not before.endswith("=")):
        return arg
    return f"{before}file://{find_path(path)}"


def paths_of(template: Mapping[str, Any], model_root: Path | None) -> Callable[[str], str]:
    """How paths inside the container map to this machine.

    A mounted claim is `MODEL_ROOT/<claim>[/subPath]`; any other path is `MODEL_ROOT/<path>` where that exists, else itself.
    What is found raises UserError for a path that is not here.
    """
    claims, images = _claims(template), _images(template)
    mounts = [mount for mount in template["spec"]["containers"][0].get("volumeMounts", ()) if mount["name"] in claims | images]

    def find(path: str) -> str:
        for mount in mounts:
            inside, claim = mount["mountPath"].rstrip("/"), claims.get(mount["name"], "")
            if path == inside or path.startswith(inside + "/"):
                if mount["name"] in images:
                    raise UserError(
                        f"the manifest names oci://{images[mount['name']]}: no images are pulled here; "
                        "copy its folder to this machine, and name it as file:///PATH or pvc://CLAIM/PATH"
                    )
                if model_root is None:
                    raise UserError(f"{path} is on the claim {claim!r}: give --model-root DIR, where DIR/{claim} stands for the claim")
                return existing(model_root / claim / mount.get("subPath", "") / path[len(inside) :].lstrip("/"))
        if model_root is not None and (model_root / path.lstrip("/")).exists():
            return str(model_root / path.lstrip("/"))
        return existing(Path(path))

    def existing(path: Path) -> str:
        # A pod would retry, for a volume may come later in a cluster. Here nothing is going to mount it.
        if not path.exists():
            raise UserError(
                f"the manifest names {path}, which is not on this machine"
                + (f" (nor below --model-root {model_root})" if model_root and not path.is_relative_to(model_root) else "")
                + ": put it there (`fairlead make-model` makes a random model), or give the --model-root DIR below which it lies"
            )
        return str(path)

    return find


def _claims(template: Mapping[str, Any]) -> dict[str, str]:
    """Volume name → claim name."""
    volumes = template["spec"].get("volumes", ())
    return {volume["name"]: volume["persistentVolumeClaim"]["claimName"] for volume in volumes if "persistentVolumeClaim" in volume}


def _images(template: Mapping[str, Any]) -> dict[str, str]:
    """Volume name → image."""
    return {volume["name"]: volume["image"]["reference"] for volume in template["spec"].get("volumes", ()) if "image" in volume}


def _inside_only(template: Mapping[str, Any]) -> set[str]:
    """Mount paths that exist in the container alone. A variable that points there (HOME, HF_HOME) keeps this machine's value."""
    return {mount["mountPath"] for mount in template["spec"]["containers"][0].get("volumeMounts", ())}


def _probe(container: Mapping[str, Any], kind: str, port: int) -> Probe | None:
    probe = container.get(kind)
    if not probe or "httpGet" not in probe:
        return None
    return Probe(
        path=probe["httpGet"].get("path", "/"),
        port=port,
        period=float(probe.get("periodSeconds", 10)),
        timeout=float(probe.get("timeoutSeconds", 1)),
        failures=int(probe.get("failureThreshold", 3)),
    )
