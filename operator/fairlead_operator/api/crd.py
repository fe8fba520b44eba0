"""The CustomResourceDefinitions, generated from the models."""

from typing import Any

from fairlead_operator.api.fields import GROUP_NAME_HELP, GROUP_NAME_LENGTH, NAME, NAME_HELP, NAME_LENGTH, rule
from fairlead_operator.api.model import MODELS_NAME
from fairlead_operator.api.profile import PROFILE_KIND, profile_schema
from fairlead_operator.api.schema import Schema, status_schema, structural_schema
from fairlead_operator.api.spec import ServiceSpec
from fairlead_operator.api.status import ServiceStatus

_NAME_RULES = [rule(f"self.metadata.name.size() <= {NAME_LENGTH} && self.metadata.name.matches('{NAME}')", NAME_HELP)]
_GROUP_RULES = [rule(f"self.spec.engine.nodes == 1 || self.metadata.name.size() < {GROUP_NAME_LENGTH}", GROUP_NAME_HELP)]
_SERVED = "(has(self.spec.model.name) ? self.spec.model.name : self.metadata.name)"
_ADAPTER_RULES = [rule(f"!has(self.spec.model.adapters) || !self.spec.model.adapters.exists(one, one.name == {_SERVED})", MODELS_NAME)]
_AGE = {"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"}


def _columns() -> list[dict[str, Any]]:
    ready, progressing = '.status.conditions[?(@.type=="Ready")]', '.status.conditions[?(@.type=="Progressing")]'
    return [
        {"name": "Model", "type": "string", "jsonPath": ".spec.model.uri"},
        {"name": "Desired", "type": "integer", "jsonPath": ".status.desiredReplicas"},
        {"name": "Ready", "type": "integer", "jsonPath": ".status.readyReplicas"},
        {"name": "Reason", "type": "string", "jsonPath": f"{ready}.reason"},
        {"name": "URL", "type": "string", "jsonPath": ".status.url"},
        _AGE,
        {"name": "External", "type": "string", "jsonPath": ".status.externalURL", "priority": 1},
        {"name": "Progress", "type": "string", "jsonPath": f"{progressing}.reason", "priority": 1},
        {"name": "Revision", "type": "string", "jsonPath": ".status.revision", "priority": 1},
        {"name": "Index", "type": "string", "jsonPath": ".status.index.state", "priority": 1},
        {"name": "Message", "type": "string", "jsonPath": f"{ready}.message", "priority": 1},
    ]


def custom_resource_definition() -> dict[str, Any]:
    """Return the CustomResourceDefinition of InferenceService."""
    # Without a status, kstatus takes a service that no operator has seen yet for one that is current.
    status = status_schema(ServiceStatus) | {"default": {"observedGeneration": -1}}
    schema = {
        "type": "object",
        "description": "A model behind one OpenAI-compatible endpoint, served by pods whose KV caches work as one cache.",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            # The bound is that of Kubernetes. Without it, the API server cannot estimate the cost of the rule on the name.
            "metadata": {"type": "object", "properties": {"name": {"type": "string", "maxLength": 253}}},
            "spec": structural_schema(ServiceSpec),
            "status": status,
        },
        "x-kubernetes-validations": [*_NAME_RULES, *_GROUP_RULES, *_ADAPTER_RULES],
    }
    scale = {"specReplicasPath": ".spec.replicas", "statusReplicasPath": ".status.replicas", "labelSelectorPath": ".status.selector"}
    names = {"shortNames": ["infer"], "categories": ["all", "inference"]}
    return _definition("InferenceService", names, schema, {"subresources": {"status": {}, "scale": scale}}, _columns())


def profile_definition() -> dict[str, Any]:
    """Return the CustomResourceDefinition of InferenceProfile."""
    schema = {
        "type": "object",
        "description": "Fields that several InferenceServices share (spec.profileRef).",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string", "description": "fairlead.dev/v1alpha1"},
            "kind": {"type": "string", "description": PROFILE_KIND},
            "metadata": {"type": "object"},
            "spec": profile_schema(),
        },
    }
    return _definition(PROFILE_KIND, {"categories": ["inference"]}, schema, {}, [_AGE])


def _definition(kind: str, names: Schema, schema: Schema, more: Schema, columns: list[Schema]) -> dict[str, Any]:
    """Return the object that is written to crds/. `names`: further names of the kind; `more`: further fields of the version."""
    version = {"name": "v1alpha1", "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}
    singular = kind.lower()
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{singular}s.fairlead.dev"},
        "spec": {
            "group": "fairlead.dev",
            "scope": "Namespaced",
            "names": {"kind": kind, "listKind": f"{kind}List", "plural": f"{singular}s", "singular": singular, **names},
            "versions": [{**version, **more, "additionalPrinterColumns": columns}],
        },
    }
