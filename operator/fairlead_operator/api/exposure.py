"""`spec.exposure`: who reaches a service over the network, and the gateway in front of it."""

from typing import Annotated, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from fairlead_operator.api.fields import DNS_LABEL, ObjectName, Part, refuse, rule, rules

_UNENFORCED = "spec.exposure.fromNamespaces is what a NetworkPolicy allows: set spec.exposure.networkPolicy to true, or remove it"

Namespace = Annotated[str, Field(min_length=1, max_length=63, pattern=DNS_LABEL)]
Hostname = Annotated[
    str, Field(min_length=1, max_length=253, pattern=r"^(\*\.)?[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$")
]
RouteDuration = Annotated[str, Field(min_length=2, max_length=16, pattern=r"^([0-9]{1,5}(h|m|s|ms)){1,4}$")]  # the Gateway API's (GEP-2257)


class Gateway(Part):
    """A Gateway of the Gateway API, to which an HTTPRoute of the operator's attaches the service."""

    name: ObjectName = Field(description="Name of the Gateway.")
    namespace: Namespace | None = Field(
        None, description="Its namespace. Absent: the service's. In another one its listeners must allow routes from here."
    )
    section_name: ObjectName | None = Field(None, description="One listener of the Gateway. Absent: every listener that allows the route.")
    hostnames: list[Hostname] = Field(
        default_factory=list, max_length=16, description="Host names that lead here. Absent: those of the listener."
    )
    timeout: RouteDuration = Field("0s", description="Longest time for a whole answer; 0s: none, the router ends streams that have died.")
    backend: Literal["Router", "EndpointPicker"] = Field(
        "Router",
        description="Router: the gateway sends requests to the routers. EndpointPicker: it asks them for the worker, and sends requests"
        " there itself, by an InferencePool.",
    )
    proxy_namespace: Namespace | None = Field(
        None, description="Where the gateway's proxies run, if not in its own namespace, such as envoy-gateway-system."
    )


class Exposure(Part):
    """Who reaches the service over the network."""

    model_config = ConfigDict(
        json_schema_extra=rules(rule("self.networkPolicy || !has(self.fromNamespaces)", _UNENFORCED, path=".fromNamespaces"))
    )

    network_policy: bool = Field(True, description="NetworkPolicies: workers are reached from the service's own routers and workers only.")
    from_namespaces: list[Namespace] | None = Field(
        None, max_length=64, description="Namespaces of clients, beside the service's own. Absent: all."
    )
    gateway: Gateway | None = Field(None, description="Attaches the service to a Gateway, where the cluster has the Gateway API.")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        refuse(self.from_namespaces is not None and not self.network_policy, _UNENFORCED)
        return self

    @property
    def picks_endpoints(self) -> bool:
        """The routers answer a gateway that asks for endpoints."""
        return self.gateway is not None and self.gateway.backend == "EndpointPicker"
