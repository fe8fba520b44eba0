"""The command line, environment and probes of one local pod, from a Deployment's pod template. No I/O except checks of model paths."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from fairlead.errors import UserError
from fairlead_worker.platform.isa import VARIABLE as CPU_LEVEL

LOOPBACK = "127.0.0.1"
_FILE_URI = re.compile(r'(?:^|(?<=[="]))file://([^"]+)')
_REFERENCE = re.compile(r"\$(\$|\(([A-Za-z_][\w.-]*)\))")


@dataclass(frozen=True)
class Probe:
    """An HTTP probe. Times are in seconds."""

    path: str
    port: int
    period: float = 10.0
    timeout: float = 1.0
    failures: int = 3


@dataclass(frozen=True)
class Container:
    """What a local pod runs. `port`: the local port in place of the container's."""

    command: tuple[str, ...]
    env: Mapping[str, str]
    port: int
    readiness: Probe | None
    liveness: Probe | None


@dataclass(frozen=True)
class PodIdentity:
    """The fields that the downward API gives a pod."""

    name: str
    namespace: str
    labels: Mapping[str, str] = field(default_factory=dict)
    ip: str = LOOPBACK

    def field(self, path: str) -> str:
        """Return the value of a `fieldRef`. Raises UserError for a field that local mode does not have."""
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
            raise UserError(f"fieldRef {path}: local mode supports {', '.join(known)} and metadata.labels['…']")
        return known[path]


def expand(text: str, env: Mapping[str, str]) -> str:
    """Expand Kubernetes' `$(VAR)`. Unknown variables stay as they are; `$$` is a dollar sign."""

    def value(match: re.Match[str]) -> str:
        if match[1] == "$":
            return "$"
        return env.get(match[2], match[0])

    return _REFERENCE.sub(value, text)


def environment(entries: Sequence[Mapping[str, Any]], identity: PodIdentity, host: Mapping[str, str]) -> dict[str, str]:
    """Return the container's own variables in order. Each may refer to earlier ones.

    For a Secret or ConfigMap key the value comes from the variable of that name in `host`, the environment of `fairlead up`.
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
                    f"the manifest takes {name} from a Secret or ConfigMap, which local mode does not have: set the variable {name} instead"
                )
        elif "resourceFieldRef" not in source:
            env[name] = expand(str(entry.get("value", "")), env)
    return env


ONE_PORT_PATHS: Mapping[tuple[str, str], str] = {("worker", "/health"): "/livez", ("agent", "/health"): "/livez"}
"""Paths of liveness probes where one port serves clients and probes: a worker's `/health` is the clients' there, and 503 while it loads."""


def local_container(
    template: Mapping[str, Any],
    identity: PodIdentity,
    *,
    port: int,
    flags: Sequence[str],
    variables: Mapping[str, str],
    host_env: Mapping[str, str],
    find_program: Callable[[Sequence[str]], Sequence[str]],
    find_path: Callable[[str], str],
) -> Container:
    """Return the first container of a pod template as a local process.

    `flags` are appended and `variables` added last, so both override the template's. `find_program` maps the container's command to one on
    this machine, `find_path` maps paths. The container's variables override `host_env`, of which no `FAIRLEAD_` variable is inherited
    except the CPU level, because that belongs to the machine.
    """
    container = template["spec"]["containers"][0]
    inside = mount_paths(container)
    own = environment([entry for entry in container.get("env", ()) if entry.get("value") not in inside], identity, host_env)
    inherited = {name: value for name, value in host_env.items() if name == CPU_LEVEL or not name.startswith("FAIRLEAD_")}
    args = [expand(arg, own) for arg in container.get("args", ())]
    command = find_program([expand(word, own) for word in container.get("command", ())])
    return Container(
        command=(*command, *(localize(arg, find_path) for arg in args), *flags),
        env={**inherited, **own, **variables, "PYTHONUNBUFFERED": "1"},
        port=port,
        readiness=_probe(container, "readinessProbe", port),
        liveness=_probe(container, "livenessProbe", port, ONE_PORT_PATHS),
    )


def localize(arg: str, find_path: Callable[[str], str]) -> str:
    """Map the path in `file:///mnt/model`, `--model=file:///mnt/model` or a JSON string to this machine. Other text stays unchanged."""
    return _FILE_URI.sub(lambda match: f"file://{find_path(match[1])}", arg)


def paths_of(template: Mapping[str, Any], model_root: Path | None) -> Callable[[str], str]:
    """Return the function that maps paths inside the container to this machine.

    A mounted claim is `MODEL_ROOT/<claim>[/subPath]`. Any other path is `MODEL_ROOT/<path>` if that exists, else itself.
    The function raises UserError for a path that does not exist here.
    """
    claims, images = _claims(template), _images(template)
    mounts = [mount for mount in template["spec"]["containers"][0].get("volumeMounts", ()) if mount["name"] in claims | images]

    def find(path: str) -> str:
        for mount in mounts:
            inside, claim = mount["mountPath"].rstrip("/"), claims.get(mount["name"], "")
            if path == inside or path.startswith(inside + "/"):
                if mount["name"] in images:
                    raise UserError(
                        f"the manifest uses oci://{images[mount['name']]}, but local mode pulls no images: "
                        "copy the model's folder to this machine and refer to it as file:///PATH or pvc://CLAIM/PATH"
                    )
                if model_root is None:
                    raise UserError(f"{path} is on the claim {claim!r}: give --model-root DIR, with the claim's files in DIR/{claim}")
                return existing(model_root / claim / mount.get("subPath", "") / path[len(inside) :].lstrip("/"))
        if model_root is not None and (model_root / path.lstrip("/")).exists():
            return str(model_root / path.lstrip("/"))
        return existing(Path(path))

    def existing(path: Path) -> str:
        # In a cluster a pod would retry, because the volume may be mounted later. Here it never will be.
        if not path.exists():
            raise UserError(
                f"the manifest uses {path}, which does not exist on this machine"
                + (f" (nor under --model-root {model_root})" if model_root and not path.is_relative_to(model_root) else "")
                + ": create it (a folder for spec.batch; `fairlead make-model` makes a random model), or give --model-root DIR"
            )
        return str(path)

    return find


def _claims(template: Mapping[str, Any]) -> dict[str, str]:
    """Return claim names by volume name."""
    volumes = template["spec"].get("volumes", ())
    return {volume["name"]: volume["persistentVolumeClaim"]["claimName"] for volume in volumes if "persistentVolumeClaim" in volume}


def _images(template: Mapping[str, Any]) -> dict[str, str]:
    """Return image references by volume name."""
    return {volume["name"]: volume["image"]["reference"] for volume in template["spec"].get("volumes", ()) if "image" in volume}


def mount_paths(container: Mapping[str, Any]) -> set[str]:
    """Return mount paths, which exist only in the container. Variables that point there (HOME, HF_HOME) keep this machine's value."""
    return {mount["mountPath"] for mount in container.get("volumeMounts", ())}


def _probe(container: Mapping[str, Any], kind: str, port: int, paths: Mapping[tuple[str, str], str] = MappingProxyType({})) -> Probe | None:
    """Return a probe. `paths`: other paths by (container, path)."""
    probe = container.get(kind)
    if not probe or "httpGet" not in probe:
        return None
    path = probe["httpGet"].get("path", "/")
    return Probe(
        path=paths.get((container["name"], path), path),
        port=port,
        period=float(probe.get("periodSeconds", 10)),
        timeout=float(probe.get("timeoutSeconds", 1)),
        failures=int(probe.get("failureThreshold", 3)),
    )
