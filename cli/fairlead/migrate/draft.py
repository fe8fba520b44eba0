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

_SILENT = ("kubectl.kubernetes.io/", "deployment.kubernetes.io/")
_OF_TOOLS = (*_SILENT, "meta.helm.sh/", "helm.sh/", "serving.kserve.io/", "app.kubernetes.io/", "pod-template-hash")
_OF_OLD_PODS = ("app.kubernetes.io/", "llm-d.ai/", "serving.kserve.io/", "kserve.io/", "helm.sh/", "pod-template-hash")
_TOOLS = "belongs to the tool that wrote it: nothing to do"
_DEVICES = "names devices: name a ResourceClaimTemplate in spec.resources.resourceClaims"
START_TTFT_MILLISECONDS = 2000


@dataclass
class Draft:
    """An InferenceService in the making: `spec`, and what `fairlead.migrate.finish` makes the rest of it from."""

    name: str = ""
    spec: dict[str, Any] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)  # source field by field below spec
    notes: list[str] = field(default_factory=list)
    flags: list[tuple[str, str, list[str], str]] = field(default_factory=list)  # name, as written on a command line, values, source field
    env: dict[str, dict[str, Any]] = field(default_factory=dict)
    variables: dict[str, str | None] = field(default_factory=dict)  # those of the container; None: the value is not in the manifest
    pod: dict[str, Any] = field(default_factory=dict)
    container: dict[str, Any] = field(default_factory=dict)
    volumes: dict[str, dict[str, Any]] = field(default_factory=dict)
    mounts: dict[str, tuple[dict[str, Any], dict[str, Any]]] = field(default_factory=dict)  # path in the container → volume, mount
    replaced: set[str] = field(default_factory=set)  # paths of `mounts` that a field replaces
    cache_paths: list[str] = field(default_factory=list)
    parallel: dict[str, tuple[int, str]] = field(default_factory=dict)  # degree and source field, by tensor, pipeline and data
    adapters: list[tuple[str, str, str]] = field(default_factory=list)  # name, path or URI, source field
    model: tuple[str, str] = ("", "")  # as vLLM's command line names it, or a URI, and the source field
    served_name: str = ""
    gpus: int | None = None
    gpu_resource: str = ""
    beside: tuple[Fields, Mapping[str, str]] | None = None  # an object read with the source, and the reasons of its fields
    all_gpus: bool = False  # the source spreads a model over all GPUs of the pod when no flag says so

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
        return Fields(self.spec).look(target)

    def note(self, source: str, text: str, value: Any = None) -> None:
        line = f"{source}{'' if value is None else f' {show(value, source)}'}: {text}"
        if line not in self.notes:
            self.notes.append(line)

    def expand(self, text: str, *, shell: bool = False) -> str:
        """Return a text with the `$(NAME)` that the kubelet replaces. `shell`: those without a known value as a shell has them."""

        def value_of(match: re.Match[str]) -> str:
            name = match[1]
            if name not in self.variables:
                if name and not shell and "envFrom" not in self.container:
                    self.note("env", "no variable of the container has this name: write its value", match.group())
                return match.group() if name else "$"
            value = self.variables[name]
            return value if value is not None else f"${{{name}}}" if shell else match.group()

        return re.sub(r"\$\$|\$\(([\w.-]+)\)", value_of, text)

    def autoscale(self, fewest: int, most: int, source: str, text: str) -> None:
        """Let the operator set the number of workers between two bounds. `text`: what the source scaled by."""
        if fewest == most:
            self.put("replicas", fewest, source)
            return
        if "replicas" in self.spec:
            self.note(self.origins["replicas"], f"{source} sets the number", self.spec.pop("replicas"))
        target = {"ttftMilliseconds": START_TTFT_MILLISECONDS}
        self.put("scaling", {"minReplicas": fewest, "maxReplicas": most, "target": target}, source)
        by = f"Fairlead scales by the expected time to first token: {START_TTFT_MILLISECONDS} ms in spec.scaling.target is a first value"
        self.note(source, f"{text}; {by}, choose yours")

    def identify(self, fields: Fields, section: str = "metadata") -> None:
        """Take over name, namespace, labels and annotations. The name is changed where Fairlead's rule for names is stricter."""
        metadata = fields.part(section)
        name = metadata.look("name")
        if not isinstance(name, str) or not name:
            raise NotMigratable(f"{metadata.at('name')} is missing: give the object a name")
        self.name = name
        if re.match(NAME, name) is None or len(name) > NAME_LENGTH:
            valid = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
            self.name = (valid if valid[:1].isalpha() else f"m-{valid}")[:NAME_LENGTH].rstrip("-")
            self.note(metadata.at("name"), f"the InferenceService is named {self.name}, because its name is that of a Service", name)
        if namespace := metadata.look("namespace"):
            self.metadata["namespace"] = str(namespace)
        for kind in ("labels", "annotations"):
            given = {str(key): str(value) for key, value in metadata.part(kind).data.items()}
            if kept := {key: value for key, value in given.items() if not key.startswith(_OF_TOOLS)}:
                self.metadata[kind] = kept
            for key in [key for key in given if key not in kept and not key.startswith(_SILENT)]:
                self.note(metadata.at(f"{kind}.{key}"), _DEVICES if "/exp-dra-" in key else _TOOLS, given[key])

    def label_pods(self, fields: Fields, labels: str, annotations: str, without: Mapping[str, Any] | None = None) -> None:
        """Carry over labels and annotations of pods; without those by which other objects select the old pods."""
        for kind, path in (("labels", labels), ("annotations", annotations)):
            given = {str(key): str(value) for key, value in fields.take(path, {}).items()}
            kept = {key: value for key, value in given.items() if key not in (without or {}) and not key.startswith(_OF_OLD_PODS)}
            for key in [key for key in given if key not in kept]:
                self.note(f"{fields.at(path)}.{key}", "objects of the old service select by it: new pods must not have it", given[key])
            if kept:
                self.put(f"podTemplate.metadata.{kind}", kept, fields.at(path))

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
