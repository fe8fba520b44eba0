"""`spec.router.tls`: ports, Secret, certificate, gateway and URL follow it."""

import ssl
from typing import Any

import aiohttp.web
import pytest
from tests.operator.status.test_status import NOW
from tests.operator.support.manifests import SETTINGS, deployment, pod, service
from tests.router.wire.test_tls import Authority

from fairlead_operator.api import InferenceService
from fairlead_operator.desired import desired
from fairlead_operator.kube.discovery import needs_optional_kind
from fairlead_operator.observed import Observed
from fairlead_operator.polling.prober import Prober, ProbeTarget
from fairlead_operator.revisions import router_revision
from fairlead_router.config import read_config

SERVED = frozenset({"Certificate", "BackendTLSPolicy", "HTTPRoute", "InferencePool"})
GIVEN = {"tls": {"secretName": "llm-tls"}}
ISSUED = {"tls": {"issuerRef": {"name": "company", "kind": "ClusterIssuer"}}}
PUBLIC = {"tls": {"issuerRef": {"name": "letsencrypt"}, "dnsNames": ["*.example.com", "api.example.com"]}}
GATEWAY = {"gateway": {"parentRef": {"name": "public"}, "hostnames": ["*.example.com", "llm.example.com"]}}


def made(one: InferenceService, served: frozenset[str] = SERVED) -> dict[tuple[str, str], Any]:
    plan = desired(one, Observed(served=served), SETTINGS, NOW)
    return {(each["kind"], each["metadata"]["name"]): each for each in plan.objects}


@pytest.mark.parametrize(("router", "secret"), [(GIVEN, "llm-tls"), (ISSUED, "qwen-router-tls")])
def test_ports_probes_policy_and_url_follow(router: dict[str, Any], secret: str) -> None:
    one = service(router=router)
    objects = made(one)
    (port,) = objects["Service", "qwen"]["spec"]["ports"]
    assert port == {"name": "https", "port": 443, "targetPort": "https", "protocol": "TCP", "appProtocol": "https"}
    spec = objects["Deployment", "qwen-router"]["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    assert {"name": "https", "containerPort": 8443, "protocol": "TCP"} in container["ports"]
    assert not [each for each in container["ports"] if each["name"] == "http"]
    config = read_config(container["args"])
    assert (config.port, config.admin_port) == (8443, 8082)
    assert (config.ssl_certfile, config.ssl_keyfile) == ("/etc/fairlead/tls/tls.crt", "/etc/fairlead/tls/tls.key")
    (mount,) = [each for each in container["volumeMounts"] if each["name"] == "tls"]
    assert mount["mountPath"] == "/etc/fairlead/tls" and "subPath" not in mount, "the kubelet updates folders only"
    (volume,) = [each["secret"] for each in spec["volumes"] if each["name"] == "tls"]
    assert volume["secretName"] == secret and {each["key"] for each in volume["items"]} == {"tls.crt", "tls.key"}
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["port"] == "admin"
    allowed = [rule["ports"][0]["port"] for rule in objects["NetworkPolicy", "qwen-router"]["spec"]["ingress"]]
    assert allowed == [8443, 8082]
    assert desired(one, Observed(), SETTINGS, NOW).status.url == "https://qwen.default.svc/v1"


@pytest.mark.parametrize(("before", "after"), [({}, GIVEN), (GIVEN, {})])
def test_clients_reach_routers_of_both_schemes_during_the_change(before: dict[str, Any], after: dict[str, Any]) -> None:
    old, new = service(router=before), service(router=after)
    revisions = tuple(body for (kind, _), body in made(old).items() if kind == "ControllerRevision")
    running = pod("qwen-router-1", "router", router_revision(old))

    def ports(one: InferenceService, *pods: Any) -> tuple[list[str], list[int]]:
        plan = desired(one, Observed(pods=pods, revisions=revisions), SETTINGS, NOW)
        objects = {(each["kind"], each["metadata"]["name"]): each for each in plan.objects}
        allowed = [rule["ports"][0]["port"] for rule in objects["NetworkPolicy", "qwen-router"]["spec"]["ingress"]]
        return [each["targetPort"] for each in objects["Service", "qwen"]["spec"]["ports"]], allowed[:-1]

    both = {"http": 8080, "https": 8443}
    now, then = ("https", "http") if after else ("http", "https")
    assert ports(new, running) == ([now, then], [both[now], both[then]])
    assert ports(new) == ([now], [both[now]]), "once the last router of before has gone"
    assert ports(old, running) == ([then], [both[then]])


@pytest.mark.parametrize(("before", "after"), [({}, GIVEN), (GIVEN, {})])
def test_a_gateway_changes_the_scheme_once_a_router_of_the_new_one_is_ready(before: dict[str, Any], after: dict[str, Any]) -> None:
    old, new = service(router=before, exposure=GATEWAY), service(router=after, exposure=GATEWAY)
    earlier = made(old)
    revisions = tuple(body for objects in (earlier, made(new)) for (kind, _), body in objects.items() if kind == "ControllerRevision")
    live = {kind: body for (kind, _), body in earlier.items() if kind == "BackendTLSPolicy"}

    def follow(one: InferenceService, *routers: tuple[InferenceService, bool]) -> tuple[set[int], Any]:
        """Return the ports of the route, and the spec of the policy."""
        pods = tuple(
            pod(f"qwen-router-{i}", "router", router_revision(each), conditions=[{"type": "Ready", "status": str(is_ready)}])
            for i, (each, is_ready) in enumerate(routers)
        )
        observed = Observed(pods=pods, revisions=revisions, served=SERVED, optional_objects=live)
        objects = {(each["kind"], each["metadata"]["name"]): each for each in desired(one, observed, SETTINGS, NOW).objects}
        ports = {each["port"] for rule in objects["HTTPRoute", "qwen"]["spec"]["rules"] for each in rule["backendRefs"]}
        return ports, objects.get(("BackendTLSPolicy", "qwen"), {}).get("spec")

    now, then = (443, 80) if after else (80, 443)
    policy = made(new if after else old)["BackendTLSPolicy", "qwen"]["spec"]
    assert follow(old, (old, True)) == ({then}, None if after else policy)
    for waiting in [((old, True),), ((old, True), (new, False))]:
        assert follow(new, *waiting) == ({then}, policy), "no router answers on the new port yet"
    assert follow(new, (old, True), (new, True)) == ({now}, policy if after else None)
    assert follow(new, (old, False), (new, False)) == ({now}, policy if after else None)


def test_without_tls_routers_get_no_flag_that_older_images_do_not_know() -> None:
    objects = made(service())
    (container,) = objects["Deployment", "qwen-router"]["spec"]["template"]["spec"]["containers"]
    assert not [each for each in container["args"] if "ssl" in each] and "--port=8080" in container["args"]
    assert not [key for key in objects if key[0] in SERVED]


def test_a_change_of_secret_or_of_tls_rolls_routers_and_of_names_does_not() -> None:
    revisions = {router_revision(service(router=router)) for router in ({}, GIVEN, {"tls": {"secretName": "other"}}, ISSUED)}
    assert len(revisions) == 4
    renamed = {"tls": {**ISSUED["tls"], "dnsNames": ["other.internal"], "caConfigMap": "ca"}}
    assert router_revision(service(router=renamed)) == router_revision(service(router=ISSUED))


def test_cert_manager_is_asked_for_every_name_of_the_service() -> None:
    spec = made(service(router=ISSUED, exposure=GATEWAY))["Certificate", "qwen-router"]["spec"]
    assert spec["secretName"] == "qwen-router-tls"
    assert spec["issuerRef"] == {"name": "company", "kind": "ClusterIssuer", "group": "cert-manager.io"}
    own = ["qwen.default.svc", "qwen.default", "qwen", "qwen.default.svc.cluster.local"]
    assert spec["dnsNames"] == [*own, "*.example.com", "llm.example.com"]
    assert made(service(router=PUBLIC))["Certificate", "qwen-router"]["spec"]["dnsNames"] == ["*.example.com", "api.example.com"]
    assert not [key for key in made(service(router=GIVEN)) if key[0] == "Certificate"]
    assert needs_optional_kind({"router": ISSUED}) and not needs_optional_kind({"router": GIVEN})


@pytest.mark.parametrize(
    ("router", "hostname", "authorities"),
    [
        (GIVEN, "llm.example.com", {"wellKnownCACertificates": "System"}),
        (ISSUED, "qwen.default.svc", {"wellKnownCACertificates": "System"}),
        (PUBLIC, "api.example.com", {"wellKnownCACertificates": "System"}),
        (
            {"tls": {**ISSUED["tls"], "caConfigMap": "our-ca"}},
            "qwen.default.svc",
            {"caCertificateRefs": [{"group": "", "kind": "ConfigMap", "name": "our-ca"}]},
        ),
    ],
)
def test_a_gateway_opens_tls_connections_to_routers_and_verifies_them(
    router: dict[str, Any], hostname: str, authorities: dict[str, Any]
) -> None:
    one = service(router=router, exposure=GATEWAY)
    objects = made(one)
    assert {each["port"] for rule in objects["HTTPRoute", "qwen"]["spec"]["rules"] for each in rule["backendRefs"]} == {443}
    policy = objects["BackendTLSPolicy", "qwen"]["spec"]
    assert policy["targetRefs"] == [{"group": "", "kind": "Service", "name": "qwen", "sectionName": "https"}]
    assert policy["validation"] == {"hostname": hostname, **authorities}
    picked = made(service(router=router, exposure={"gateway": {**GATEWAY["gateway"], "backend": "EndpointPicker"}}))
    assert ("BackendTLSPolicy", "qwen") not in picked, "the gateway sends requests to workers"
    without = SERVED - {"BackendTLSPolicy"}
    assert not [key for key in made(one, without) if key[0] == "HTTPRoute"], "requests would fail"
    condition = next(
        each for each in desired(one, Observed(served=without), SETTINGS, NOW).status.conditions if each.type == "GatewayReady"
    )
    assert (condition.status, condition.reason) == ("False", "GatewayApiMissing") and "BackendTLSPolicy" in condition.message


def certificate(*conditions: tuple[str, str, str, str]) -> dict[str, Any]:
    fields = ("type", "status", "reason", "message")
    return {"Certificate": {"status": {"conditions": [dict(zip(fields, each, strict=True)) for each in conditions]}}}


@pytest.mark.parametrize(
    ("served", "live", "reason"),
    [
        (SERVED - {"Certificate"}, {}, "CertManagerMissing"),
        (SERVED, {}, ""),
        (SERVED, certificate(("Ready", "False", "DoesNotExist", "Issuing certificate"), ("Issuing", "True", "DoesNotExist", "")), ""),
        (SERVED, certificate(("Issuing", "False", "Failed", "the order is refused")), "CertificateNotIssued"),
        (SERVED, certificate(("Ready", "True", "Ready", "up to date")), ""),
    ],
)
def test_why_there_is_no_certificate_is_a_fault(served: frozenset[str], live: dict[str, Any], reason: str) -> None:
    running = {"worker": deployment("worker", 1), "router": deployment("router", 2, ready=0)}
    status = desired(service(router=ISSUED), Observed(running, served=served, optional_objects=live), SETTINGS, NOW).status
    conditions = {each.type: each for each in status.conditions}
    assert (conditions["Degraded"].status == "True") == bool(reason)
    if reason:
        assert conditions["Ready"].reason == conditions["Degraded"].reason == reason and "cert-manager" in conditions["Degraded"].message


async def test_the_operators_probe_uses_tls(tmp_path: Any) -> None:
    authority = Authority(tmp_path)
    authority.mount()
    seen: list[str] = []

    async def answer(request: aiohttp.web.Request) -> aiohttp.web.Response:
        seen.append(request.url.scheme)
        return aiohttp.web.json_response({"choices": [{}]})

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(authority.certfile, authority.keyfile)
    app = aiohttp.web.Application()
    app.router.add_post("/v1/completions", answer)
    runner = aiohttp.web.AppRunner(app)
    await runner.setup()
    site = aiohttp.web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context)
    await site.start()
    port = runner.addresses[0][1]
    target = ProbeTarget.of(service(router=GIVEN))
    assert target.scheme == "https" and ProbeTarget.of(service()).scheme == "http"
    prober = Prober("cluster.local", f"https://127.0.0.1:{port}")
    try:
        assert await prober.complete(target) == ""
        assert seen == ["https"]
    finally:
        await prober.close()
        await runner.cleanup()
