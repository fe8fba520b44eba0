"""`spec.exposure`: network access to a service, and the gateway in front of it."""

from typing import Annotated, Literal

from pydantic import Field

from fairlead_operator.api.fields import DNS_LABEL, NAME, NAME_LENGTH, ObjectName, Part, list_set, refuse, rule, ruled

_UNENFORCED = (
    "spec.exposure.fromNamespaces is enforced by NetworkPolicies: set spec.exposure.networkPolicy to Managed, or remove fromNamespaces"
)
_PICKED = (
    "spec.exposure.otherServices needs routers that forward requests, and gateway.backend EndpointPicker sends them to workers: "
    "set backend to Router, or remove otherServices"
)

Namespace = Annotated[str, Field(min_length=1, max_length=63, pattern=DNS_LABEL)]
Hostname = Annotated[
    str, Field(min_length=1, max_length=253, pattern=r"^(\*\.)?[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$")
]

OtherServiceName = Annotated[str, Field(min_length=1, max_length=NAME_LENGTH, pattern=NAME)]


class ParentRef(Part):
    """A reference to a Gateway of the Gateway API."""

    name: ObjectName = Field(description="Name of the Gateway.")
    namespace: Namespace | None = Field(None, description="Namespace of the Gateway. Absent: the service's.")
    section_name: ObjectName | None = Field(None, description="Listener of the Gateway. Absent: all that allow the route.")


class Gateway(Part):
    """Attaches the service to a Gateway with an HTTPRoute that the operator creates."""

    parent_ref: ParentRef = Field(description="The Gateway.")
    hostnames: list[Hostname] = Field(
        default_factory=list,
        max_length=16,
        description="Host names of the route, such as llm.example.com. Absent: those of the listener.",
        json_schema_extra=list_set(),
    )
    timeout_seconds: Annotated[int, Field(ge=1, le=604_800)] | None = Field(
        None, description="Longest time for a complete response. Absent: none."
    )
    backend: Literal["Router", "EndpointPicker"] = Field(
        "Router", description="Router: requests go to routers. EndpointPicker: the gateway asks them for a worker (InferencePool)."
    )
    proxy_namespace: Namespace | None = Field(
        None, description="Namespace of the proxies, such as envoy-gateway-system. Absent: that of the Gateway."
    )


class Exposure(Part):
    """Network access to the service."""

    model_config = ruled(
        rule("self.networkPolicy == 'Managed' || !has(self.fromNamespaces)", _UNENFORCED, path=".fromNamespaces"),
        rule("!has(self.otherServices) || !has(self.gateway) || self.gateway.backend == 'Router'", _PICKED, path=".otherServices"),
    )

    network_policy: Literal["Managed", "None"] = Field(
        "Managed", description="Managed: NetworkPolicies admit only the service's own pods to its workers."
    )
    from_namespaces: list[Namespace] | None = Field(
        None,
        max_length=64,
        description="Namespaces of clients, in addition to the service's own. Absent: all.",
        json_schema_extra=list_set(),
    )
    other_services: list[OtherServiceName] = Field(
        default_factory=list,
        max_length=64,
        description="InferenceServices of this namespace whose models this endpoint serves too.",
        json_schema_extra=list_set(),
    )
    gateway: Gateway | None = Field(None, description="A Gateway in front of the service. Needs the Gateway API in the cluster.")

    def check_rules(self) -> None:
        refuse(self.from_namespaces is not None and self.network_policy == "None", _UNENFORCED)
        refuse(bool(self.other_services) and self.picks_endpoints, _PICKED)

    @property
    def picks_endpoints(self) -> bool:
        """Whether the routers serve as the endpoint picker of a gateway."""
        return self.gateway is not None and self.gateway.backend == "EndpointPicker"
