"""`status.externalURL` and GatewayReady, from the Gateway itself."""

from typing import Any, cast

import pytest
from tests.operator.status.test_status import NOW
from tests.operator.support.manifests import SETTINGS, manifest, service

from fairlead_operator.desired import desired
from fairlead_operator.kube.cache import Cache
from fairlead_operator.kube.client import ApiError, Cluster
from fairlead_operator.kube.gateways import NOT_FOUND, GatewayReader
from fairlead_operator.observed import Observed

ACCEPTED = {"HTTPRoute": {"status": {"parents": [{"conditions": [{"type": "Accepted", "status": "True"}]}]}}}
SERVED = frozenset({"HTTPRoute", "InferencePool"})
HTTP = {"name": "http", "protocol": "HTTP", "port": 80}
HTTPS = {"name": "https", "protocol": "HTTPS", "port": 443}


def gateway(*listeners: dict[str, Any], addresses: Any = (), **status: Any) -> dict[str, Any]:
    return {"spec": {"listeners": list(listeners)}, "status": {"addresses": [{"value": one} for one in addresses], **status}}


def status_of(live: Any, hostnames: Any = (), section: str | None = None, **objects: Any) -> Any:
    parent = {"name": "web"} | ({"sectionName": section} if section else {})
    one = service(exposure={"gateway": {"parentRef": parent, "hostnames": list(hostnames)}})
    return desired(one, Observed(served=SERVED, optional_objects=ACCEPTED | objects, gateway=live), SETTINGS, NOW).status


def ready(status: Any) -> tuple[str, str, str]:
    (found,) = [one for one in status.conditions if one.type == "GatewayReady"]
    return found.status, found.reason, found.message


@pytest.mark.parametrize(
    ("live", "hostnames", "section", "url"),
    [
        (gateway(HTTP, HTTPS), ["llm.example.com"], None, "https://llm.example.com/v1"),
        (gateway(HTTP, HTTPS), ["llm.example.com"], "http", "http://llm.example.com/v1"),
        (gateway(HTTP | {"port": 8080}), ["llm.example.com"], None, "http://llm.example.com:8080/v1"),
        (gateway(HTTPS | {"hostname": "*.example.com"}), ["a.other.org", "llm.example.com"], None, "https://llm.example.com/v1"),
        (gateway(HTTPS | {"hostname": "*.example.com"}), ["a.b.example.com"], None, "https://a.b.example.com/v1"),
        (gateway(HTTPS | {"hostname": "*.example.com"}), ["example.com"], None, ""),
        (gateway(HTTPS | {"hostname": "llm.example.com"}), ["*.example.com"], None, "https://llm.example.com/v1"),
        (gateway(HTTPS | {"hostname": "llm.example.com"}), [], None, "https://llm.example.com/v1"),
        (gateway(HTTPS | {"hostname": "*.example.com"}, HTTP, addresses=["192.0.2.7"]), [], None, "http://192.0.2.7/v1"),
        (gateway(HTTP, addresses=["2001:db8::7"]), [], None, "http://[2001:db8::7]/v1"),
        (gateway(HTTP), [], None, ""),
        (gateway({"name": "t", "protocol": "TCP", "port": 9}), ["llm.example.com"], None, ""),
        (NOT_FOUND, ["llm.example.com"], None, ""),
        (None, ["llm.example.com"], None, ""),
    ],
)
def test_the_external_url_is_one_that_a_listener_serves(live: Any, hostnames: list[str], section: str | None, url: str) -> None:
    assert status_of(live, hostnames, section).external_url == url


def test_a_gateway_that_is_missing_or_not_programmed_is_a_fault() -> None:
    assert ready(status_of(gateway(HTTP)))[:2] == ("True", "Accepted")
    assert ready(status_of(None))[:2] == ("True", "Accepted"), "the route's own status counts where the Gateway may not be read"
    status, reason, message = ready(status_of(NOT_FOUND, HTTPRoute={"status": {}}))
    assert (status, reason) == ("False", "GatewayNotFound") and "default/web" in message
    programmed = {"type": "Programmed", "status": "False", "reason": "AddressNotAssigned", "message": "no address"}
    found = status_of(gateway(HTTP, conditions=[programmed]))
    assert ready(found) == ("False", "AddressNotAssigned", "Gateway web: Programmed: no address")
    assert {one.type: one.reason for one in found.conditions}["Degraded"] == "AddressNotAssigned"
    certificate = {"type": "ResolvedRefs", "status": "False", "reason": "InvalidCertificateRef", "message": "no Secret"}
    listeners = [{"name": "https", "conditions": [certificate]}]
    assert ready(status_of(gateway(HTTP, HTTPS, listeners=listeners), section="https"))[1] == "InvalidCertificateRef"
    assert ready(status_of(gateway(HTTP, HTTPS, listeners=listeners), section="http"))[0] == "True", "another listener's trouble"


def test_a_pool_without_an_answer_is_mentioned() -> None:
    assert "has not reported on the InferencePool" in ready(status_of(gateway(HTTP), InferencePool={"status": {}}))[2]
    taken = {"status": {"parents": [{"conditions": [{"type": "Accepted", "status": "True"}]}]}}
    assert "InferencePool" not in ready(status_of(gateway(HTTP), InferencePool=taken))[2]


class ApiServer:
    """Answers reads of Gateways, and counts them."""

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str], Any] = {}
        self.reads: list[tuple[str, str]] = []
        self.error: Exception | None = None

    async def get(self, kind: Any, namespace: str, name: str) -> Any:
        self.reads.append((namespace, name))
        if self.error is not None:
            raise self.error
        return self.objects.get((namespace, name))


async def test_one_read_serves_all_services_of_a_gateway_and_a_change_wakes_them() -> None:
    api, woken = ApiServer(), []
    cache = Cache(lambda owner: None)
    for number in range(3):
        body = manifest(f"s{number}", exposure={"gateway": {"parentRef": {"name": "web", "namespace": "infra"}}})
        body["metadata"] |= {"uid": f"u{number}", "resourceVersion": str(number + 1)}
        cache.put(body)
    reader = GatewayReader(cast(Cluster, api), cache, lambda: woken.append(1))
    assert reader.find("infra", "web") is None
    await reader.read()
    assert reader.find("infra", "web") == NOT_FOUND and api.reads == [("infra", "web")] and len(woken) == 1
    api.objects["infra", "web"] = gateway(HTTP)
    await reader.read()
    await reader.read()
    assert len(woken) == 2, "woken by the change alone"
    api.error = ApiError(403, "forbidden")
    await reader.read()
    found = reader.find("infra", "web")
    assert found is not None and found["spec"]["listeners"] == [HTTP], "the last answer stays"
