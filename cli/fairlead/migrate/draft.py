"""The InferenceService that is being made of a source object, with the source field of each of its fields and the notes to the user."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fairlead.migrate.fields import RENDER, Fields, NotMigratable, find_template, show
from fairlead_operator.api import API_VERSION, KIND, InferenceService, InvalidManifest
from fairlead_operator.api.engine import Engine
from fairlead_operator.api.fields import NAME, NAME_LENGTH, Part
from fairlead_operator.api.spec import ServiceSpec

SERVER_FIELDS = ("uid", "resourceVersion", "generation", "creationTimestamp", "managedFields", "selfLink", "ownerReferences", "finalizers")
_OTHERS_ANNOTATIONS = ("kubectl.kubernetes.io/", "deployment.kubernetes.io/", "meta.helm.sh/", "serving.kserve.io/", "helm.sh/")
_OTHERS_LABELS = ("app.kubernetes.io/", "helm.sh/", "pod-template-hash", "serving.kserve.io/")
_TOOLS = "belongs to the tool that wrote it: nothing to do"
START_TTFT_MILLISECONDS = 2000


@dataclass
class Draft:
    """An InferenceService in the making: `spec`, and what `fairlead.migrate.finish` makes the rest of it from.

    `model`: as vLLM's command line names it, or a URI. `mounts`: path in the engine's container → volume source, folder in it.
    `pods`: of one replica. `all_gpus`: the source spreads a model over all GPUs of the pod when no flag says so.
    """

    name: str = ""
    spec: dict[str, Any] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    flags: list[tuple[str, str, list[str], str]] = field(default_factory=list)  # name, as written on a command line, values, source field
    env: dict[str, dict[str, Any]] = field(default_factory=dict)
    pod: dict[str, Any] = field(default_factory=dict)
    container: dict[str, Any] = field(default_factory=dict)
    volumes: dict[str, dict[str, Any]] = field(default_factory=dict)
    claims: dict[str, Fields] = field(default_factory=dict)  # resourceClaims of the pod
    mounts: dict[str, tuple[dict[str, Any], str]] = field(default_factory=dict)
    mount_specs: dict[str, dict[str, Any]] = field(default_factory=dict)  # those of `mounts` that nothing has replaced yet
    cache_paths: list[str] = field(default_factory=list)
    parallel: dict[str, tuple[int, str]] = field(default_factory=dict)  # tensor, pipeline, data → degree, source field
    adapters: list[tuple[str, str, str]] = field(default_factory=list)  # name, path or URI, source field
    scope: str = ""  # path of the part of the source that is this service's alone
    model: str = ""
    model_source: str = ""
    served_name: str = ""
    gpus: int | None = None
    pods: int = 1
    all_gpus: bool = False
    splits_prefill: bool = False

    def put(self, target: str, value: Any, source: str) -> None:
        """Set a field below spec, and remember the source field for messages."""
        node = self.spec
        *names, last = target.split(".")
        for name in names:
            node = node.setdefault(name, {})
        if last in node and node[last] != value:
            self.note(self.origins.get(target, target), f"{source} is used instead")
        node[last] = value
        self.origins[target] = source

    def get(self, target: str) -> Any:
        node: Any = self.spec
        for name in target.split("."):
            node = node.get(name) if isinstance(node, Mapping) else None
        return node

    def note(self, source: str, text: str, value: Any = None) -> None:
        shown = "" if value is None else f" {show(value, source)}"
        line = f"{source}{shown}: {text}"
        if line not in self.notes:
            self.notes.append(line)

    def flag(self, name: str, source: str, *values: str) -> None:
        """Add a flag of vLLM that a field of the source stands for."""
        self.flags.append((name, "", list(values), source))

    def autoscale(self, bounds: tuple[int, int], source: str, text: str) -> None:
        """Let the operator set the number of workers between the bounds. `text`: what the source scaled by."""
        fewest, most = bounds
        if fewest == most:
            self.put("replicas", fewest, source)
            return
        if "replicas" in self.spec:
            self.note(self.origins["replicas"], f"{source} sets the number", self.spec.pop("replicas"))
        self.put("scaling.minReplicas", fewest, source)
        self.put("scaling.maxReplicas", most, source)
        self.put("scaling.target.ttftMilliseconds", START_TTFT_MILLISECONDS, source)
        self.note(
            source,
            f"{text}; Fairlead scales by the expected time to first token: {START_TTFT_MILLISECONDS} ms in "
            "spec.scaling.target is a first value, choose yours",
        )

    def identify(self, metadata: Mapping[str, Any]) -> None:
        """Take over name, namespace, labels and annotations."""
        if not isinstance(metadata, Mapping):
            raise NotMigratable(f"metadata must be a mapping (got {show(metadata)})")
        self.rename(metadata.get("name") or "", "metadata.name")
        if namespace := metadata.get("namespace"):
            self.metadata["namespace"] = str(namespace)
        for kind, others in (("labels", _OTHERS_LABELS), ("annotations", _OTHERS_ANNOTATIONS)):
            given = metadata.get(kind) or {}
            if not isinstance(given, Mapping):
                raise NotMigratable(f"metadata.{kind} must be a mapping (got {show(given)})")
            kept = {str(key): str(value) for key, value in given.items() if not str(key).startswith(others)}
            for key in (str(one) for one in given if str(one) not in kept):
                if not key.startswith(("kubectl.kubernetes.io/", "deployment.kubernetes.io/")):
                    own = "names devices: name a ResourceClaimTemplate in spec.resources.resourceClaims" if "/exp-dra-" in key else _TOOLS
                    self.note(f"metadata.{kind}.{key}", own, given.get(key))
            if kept:
                self.metadata[kind] = kept

    def rename(self, name: str, source: str) -> None:
        """Set the name of the service, changed where Fairlead's rule for names is stricter."""
        if not isinstance(name, str) or not name:
            raise NotMigratable(f"{source} is missing: give the object a name")
        valid = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
        valid = (valid if valid[:1].isalpha() else f"m-{valid}")[:NAME_LENGTH].rstrip("-")
        if re.match(NAME, name) is None or len(name) > NAME_LENGTH:
            self.note(source, f"the InferenceService is named {valid}, because its name is that of a Service", name)
            name = valid
        self.name = name

    def manifest(self) -> dict[str, Any]:
        """Return the InferenceService. Raises NotMigratable, with the source field, if it is not valid."""
        spec = _in_order(self.spec, ServiceSpec) | {"engine": _in_order(self.spec.get("engine", {}), Engine)}
        body = {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": self.name, **self.metadata}, "spec": spec}
        if template := find_template(body):
            raise NotMigratable(f"{show(template)} {RENDER}")
        try:
            InferenceService.parse(body)
        except InvalidManifest as error:
            raise NotMigratable(self._with_origins(str(error))) from None
        return body

    def _with_origins(self, message: str) -> str:
        """Return a message about the result with the source field after each field that it names."""

        def add(match: re.Match[str]) -> str:
            path = match.group(1)
            while path and path not in self.origins:
                path = path.rpartition(".")[0]
            return f"{match.group()} (from {self.origins[path]})" if path else match.group()

        return re.sub(r"spec\.((?:[A-Za-z]+)(?:\.[A-Za-z]+)*)(?:\[\d+\](?:\.\w+)*)?", add, message)


def _in_order(section: Mapping[str, Any], part: type[Part]) -> dict[str, Any]:
    """Return a section with its fields in the order of the API."""
    order = [field.alias for field in part.model_fields.values()]
    return {name: section[name] for name in sorted(section, key=order.index)}
