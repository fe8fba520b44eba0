"""`spec.router`: the pods of the routers, their number under load, and TLS of their port. How they route is `spec.routing`."""

from typing import Annotated

from pydantic import Field

from fairlead_operator.api.fields import ObjectName, Part, Quantity, list_set, refuse, rule, ruled
from fairlead_operator.api.pod_template import PodTemplate

_TLS_SOURCE = "spec.router.tls needs exactly one of secretName and issuerRef: name a Secret with a certificate, or its issuer"
_TLS_NAMES = "spec.router.tls.dnsNames are put into the certificate of issuerRef: remove them, or replace secretName by issuerRef"
DnsName = Annotated[
    str, Field(min_length=1, max_length=253, pattern=r"^(\*\.)?[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$")
]


class RouterAutoscaling(Part):
    """Routers by load: a HorizontalPodAutoscaler between `routing.replicas` and `maxReplicas`."""

    max_replicas: int = Field(ge=1, le=64, description="Most routers. The fewest are spec.routing.replicas.")
    target_cpu: Quantity = Field("700m", description="Mean CPU use of the routers above which one is added.")


class IssuerRef(Part):
    """A reference to an issuer of cert-manager."""

    name: ObjectName = Field(description="Name of the issuer.")
    kind: str = Field(
        "Issuer",
        min_length=1,
        max_length=63,
        pattern="^[A-Z][A-Za-z0-9]*$",
        description="Issuer: in the namespace of the service. ClusterIssuer: of the cluster.",
    )
    group: ObjectName = Field("cert-manager.io", description="Group of the issuer. Others than the default are external issuers.")


class RouterTls(Part):
    """TLS of the port for clients: the Service then has port 443 instead of 80."""

    model_config = ruled(
        rule("has(self.secretName) != has(self.issuerRef)", _TLS_SOURCE),
        rule("!has(self.dnsNames) || has(self.issuerRef)", _TLS_NAMES, path=".dnsNames"),
    )

    secret_name: ObjectName | None = Field(
        None, description="A Secret of type kubernetes.io/tls. Routers apply a change without a restart."
    )
    issuer_ref: IssuerRef | None = Field(None, description="cert-manager's issuer of the certificate.")
    dns_names: list[DnsName] | None = Field(
        None,
        min_length=1,
        max_length=32,
        description="Host names of issuerRef's certificate. Absent: the Service's and the gateway's.",
        json_schema_extra=list_set(),
    )
    ca_config_map: ObjectName | None = Field(
        None, description="ConfigMap with ca.crt, by which the gateway verifies routers. Absent: the gateway's own authorities."
    )

    def check_rules(self) -> None:
        refuse((self.secret_name is None) == (self.issuer_ref is None), _TLS_SOURCE)
        refuse(self.dns_names is not None and self.issuer_ref is None, _TLS_NAMES)


class Router(Part):
    """The router pods."""

    pod_template: PodTemplate | None = Field(None, description="Merged last into the pod template of the routers.")
    autoscaling: RouterAutoscaling | None = Field(None, description="Routers by load. Absent: spec.routing.replicas of them.")
    tls: RouterTls | None = Field(None, description="TLS of the port for clients. Absent: plain HTTP.")
