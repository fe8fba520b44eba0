"""The CustomResourceDefinition, generated from the models."""

from typing import Any

from fairlead_operator.api.adapters import MODELS_NAME
from fairlead_operator.api.fields import GROUP_NAME_HELP, GROUP_NAME_LENGTH, NAME, NAME_HELP, NAME_LENGTH, rule
from fairlead_operator.api.schema import Schema, status_schema, structural_schema
from fairlead_operator.api.spec import ServiceSpec
from fairlead_operator.api.status.service_status import ServiceStatus

_NAME_RULES = [rule(f"self.metadata.name.size() <= {NAME_LENGTH} && self.metadata.name.matches('{NAME}')", NAME_HELP)]
_GROUP_RULES = [rule(f"self.spec.engine.nodes == 1 || self.metadata.name.size() < {GROUP_NAME_LENGTH}", GROUP_NAME_HELP)]
_SERVED = "(has(self.spec.model.name) ? self.spec.model.name : self.metadata.name)"
_ADAPTER_RULES = [
    rule(f"!has(self.spec.model.adapters) || !self.spec.model.adapters.exists(one, one.name == {_SERVED})", MODELS_NAME),
]


def _columns() -> list[dict[str, Any]]:
    ready, progressing = '.status.conditions[?(@.type=="Ready")]', '.status.conditions[?(@.type=="Progressing")]'
    return [
        {"name": "Model", "type": "string", "jsonPath": ".spec.model.uri"},
        {"name": "Desired", "type": "integer", "jsonPath": ".status.desiredReplicas"},
        {"name": "Ready", "type": "integer", "jsonPath": ".status.readyReplicas"},
        {"name": "Reason", "type": "string", "jsonPath": f"{ready}.reason"},
        {"name": "URL", "type": "string", "jsonPath": ".status.url"},
        {"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"},
        {"name": "External", "type": "string", "jsonPath": ".status.externalURL", "priority": 1},
        {"name": "Progress", "type": "string", "jsonPath": f"{progressing}.reason", "priority": 1},
        {"name": "Revision", "type": "string", "jsonPath": ".status.revision", "priority": 1},
        {"name": "Index", "type": "string", "jsonPath": ".status.index.state", "priority": 1},
        {"name": "Message", "type": "string", "jsonPath": f"{ready}.message", "priority": 1},
    ]


def _root() -> Schema:
    return {
        "type": "object",
        "description": "A model behind one OpenAI-compatible endpoint, served by pods whose KV caches work as one cache.",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            # The bound is that of Kubernetes. Without it, the API server cannot estimate the cost of the rule on the name.
            "metadata": {"type": "object", "properties": {"name": {"type": "string", "maxLength": 253}}},
            "spec": structural_schema(ServiceSpec),
            # Without a status, kstatus takes a service that no operator has seen yet for one that is current.
            "status": status_schema(ServiceStatus) | {"default": {"observedGeneration": -1}},
        },
        "x-kubernetes-validations": [*_NAME_RULES, *_GROUP_RULES, *_ADAPTER_RULES],
    }


def custom_resource_definition() -> dict[str, Any]:
    """Return the object that is written to crds/."""
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
