"""The CustomResourceDefinition, generated from the models."""

from typing import Any

from fairlead_operator.api.adapters import MODELS_NAME, unnamed
from fairlead_operator.api.fields import NAME, NAME_HELP, NAME_LENGTH, rule
from fairlead_operator.api.schema import Schema, structural
from fairlead_operator.api.spec import ServiceSpec
from fairlead_operator.api.status import ServiceStatus

_NAME_RULES = [rule(f"self.metadata.name.size() <= {NAME_LENGTH} && self.metadata.name.matches('{NAME}')", NAME_HELP)]
_ADAPTER_RULES = [rule(f"has(self.spec.model.name) || {unnamed('self.spec.model', 'self.metadata.name')}", MODELS_NAME)]


def _columns() -> list[dict[str, Any]]:
    ready = '.status.conditions[?(@.type=="Ready")]'
    return [
        {"name": "Model", "type": "string", "jsonPath": ".spec.model.uri"},
        {"name": "Ready", "type": "string", "jsonPath": ".status.ready", "description": "Workers ready / wanted."},
        {"name": "Reason", "type": "string", "jsonPath": f"{ready}.reason", "description": "Why it is ready or not."},
        {"name": "URL", "type": "string", "jsonPath": ".status.url"},
        {"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"},
        {"name": "Revision", "type": "string", "jsonPath": ".status.revision", "priority": 1},
        {"name": "Index", "type": "string", "jsonPath": ".status.index.state", "description": "What steers requests.", "priority": 1},
        {"name": "Message", "type": "string", "jsonPath": f"{ready}.message", "priority": 1},
    ]


def _root() -> Schema:
    return {
        "type": "object",
        "description": "A model served behind one OpenAI-compatible endpoint, by pods whose KV caches behave as one.",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            # The bound is Kubernetes' own; without it the cost of the rule on the name cannot be estimated.
            "metadata": {"type": "object", "properties": {"name": {"type": "string", "maxLength": 253}}},
            "spec": structural(ServiceSpec),
            "status": structural(ServiceStatus, defaults=False),
        },
        "x-kubernetes-validations": [*_NAME_RULES, *_ADAPTER_RULES],
    }


def custom_resource_definition() -> dict[str, Any]:
    """The whole object, as written to crds/."""
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": "inferenceservices.fairlead.dev"},
        "spec": {
            "group": "fairlead.dev",
            "scope": "Namespaced",
            "names": {
                "kind": "InferenceService",
                "listKind": "InferenceServiceList",
                "plural": "inferenceservices",
                "singular": "inferenceservice",
                "shortNames": ["infer"],
                "categories": ["all", "inference"],
            },
            "versions": [
                {
                    "name": "v1alpha1",
                    "served": True,
                    "storage": True,
                    "schema": {"openAPIV3Schema": _root()},
                    "subresources": {
                        "status": {},
                        "scale": {
                            "specReplicasPath": ".spec.replicas",
                            "statusReplicasPath": ".status.replicas",
                            "labelSelectorPath": ".status.selector",
                        },
                    },
                    "additionalPrinterColumns": _columns(),
                }
            ],
        },
    }
