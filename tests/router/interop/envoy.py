"""The configuration of a real Envoy in front of the endpoint picker, as gateways of the inference extension write theirs."""

from collections.abc import Sequence
from typing import Any

DESTINATION = "x-gateway-destination-endpoint"
TYPE = "type.googleapis.com/envoy."
EVERYTHING: Sequence[dict[str, Any]] = ({"prefix": "/"},)


def endpoint(address: str) -> dict[str, Any]:
    host, port = address.rsplit(":", 1)
    return {"endpoint": {"address": {"socket_address": {"address": host, "port_value": int(port)}}}}


def build_configuration(
    listener: str,
    admin: str,
    picker: str,
    pool: list[str],
    request_body: str = "FULL_DUPLEX_STREAMED",
    response_body: str = "FULL_DUPLEX_STREAMED",
    matches: Sequence[dict[str, Any]] = EVERYTHING,
) -> dict[str, Any]:
    """Return a listener that sends requests through the picker to a pool by `override_host`, with retries down its list. No TLS check.

    `listener`, `admin`, `picker`, and each of `pool`: IP:PORT. `matches`: Envoy's route matches; other paths get 404.
    """
    trailers = {"request_trailer_mode": "SEND", "response_trailer_mode": "SEND"}
    ext_proc = {
        "@type": TYPE + "extensions.filters.http.ext_proc.v3.ExternalProcessor",
        "grpc_service": {"envoy_grpc": {"cluster_name": "picker"}},
        "message_timeout": "10s",
        "processing_mode": {
            "request_header_mode": "SEND",
            "response_header_mode": "SEND",
            "request_body_mode": request_body,
            "response_body_mode": response_body,
            **(trailers if "FULL_DUPLEX_STREAMED" in (request_body, response_body) else {}),
        },
        "metadata_options": {
            "forwarding_namespaces": {"untyped": ["envoy.lb", "envoy.lb.subset_hint"]},
            "receiving_namespaces": {"untyped": ["envoy.lb"]},
        },
    }
    served = {"key": "envoy.lb", "path": [{"key": DESTINATION + "-served"}]}
    override = {
        "@type": TYPE + "extensions.load_balancing_policies.override_host.v3.OverrideHost",
        "override_host_sources": [{"metadata": {"key": "envoy.lb", "path": [{"key": DESTINATION}]}}],
        "selected_host_key": served,
        "fallback_policy": {
            "policies": [
                {
                    "typed_extension_config": {
                        "name": "round_robin",
                        "typed_config": {"@type": TYPE + "extensions.load_balancing_policies.round_robin.v3.RoundRobin"},
                    }
                }
            ]
        },
    }
    route = {"cluster": "pool", "timeout": "30s", "retry_policy": {"retry_on": "connect-failure,reset", "num_retries": 2}}
    routes = [{"match": match, "route": route} for match in matches]
    manager = {
        "@type": TYPE + "extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "gateway",
        "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": routes}]},
        "http_filters": [
            {"name": "envoy.filters.http.ext_proc", "typed_config": ext_proc},
            {"name": "envoy.filters.http.router", "typed_config": {"@type": TYPE + "extensions.filters.http.router.v3.Router"}},
        ],
    }
    http2 = {"@type": TYPE + "extensions.upstreams.http.v3.HttpProtocolOptions", "explicit_http_config": {"http2_protocol_options": {}}}
    tls = {
        "@type": TYPE + "extensions.transport_sockets.tls.v3.UpstreamTlsContext",
        "common_tls_context": {"alpn_protocols": ["h2"], "validation_context": {}},
    }
    return {
        "admin": {"address": endpoint(admin)["endpoint"]["address"]},
        "static_resources": {
            "listeners": [
                {
                    "name": "gateway",
                    "address": endpoint(listener)["endpoint"]["address"],
                    "filter_chains": [{"filters": [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]}],
                }
            ],
            "clusters": [
                {
                    "name": "pool",
                    "connect_timeout": "2s",
                    "load_assignment": {"cluster_name": "pool", "endpoints": [{"lb_endpoints": [endpoint(address) for address in pool]}]},
                    "load_balancing_policy": {
                        "policies": [{"typed_extension_config": {"name": "override_host", "typed_config": override}}]
                    },
                },
                {
                    "name": "picker",
                    "connect_timeout": "2s",
                    "load_assignment": {"cluster_name": "picker", "endpoints": [{"lb_endpoints": [endpoint(picker)]}]},
                    "typed_extension_protocol_options": {"envoy.extensions.upstreams.http.v3.HttpProtocolOptions": http2},
                    "transport_socket": {"name": "envoy.transport_sockets.tls", "typed_config": tls},
                    "health_checks": [
                        {"timeout": "1s", "interval": "1s", "unhealthy_threshold": 2, "healthy_threshold": 1, "grpc_health_check": {}}
                    ],
                },
            ],
        },
    }
