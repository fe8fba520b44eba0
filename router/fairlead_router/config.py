"""The router's configuration: flags, each with an environment variable `FAIRLEAD_<FLAG>` (flags win, the last one given wins)."""

import re
from typing import Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator
from pydantic_settings import SettingsConfigDict

from fairlead_common.flags import FlagSettings, OptionalPort
from fairlead_common.http.origins import parse_origins
from fairlead_common.routing_policy import DESCRIPTION, RoutingPolicy
from fairlead_common.telemetry.logs import LogFormat, LogLevel
from fairlead_index.redis.access import RedisAccess, redact_url
from fairlead_router.service_classes import ServiceClasses, parse_classes

IndexMode = Literal["auto", "mirror", "remote"]
NOT_FORWARDED = frozenset(
    b"connection keep-alive proxy-connection proxy-authenticate proxy-authorization te trailer transfer-encoding upgrade expect host "
    b"content-length accept-encoding authorization x-api-key cookie x-request-id x-slo-class".split()
)
"""Headers of clients that the router uses itself, so that workers do not get them."""


def check_session_header(value: str) -> str:
    """Return the name in lower case. Raises ValueError for one that no client sends, or that the router uses itself."""
    name = value.lower()
    if re.fullmatch(r"[a-z0-9-]+", name) is None or name.encode() in NOT_FORWARDED or name.startswith("x-fairlead-"):
        raise ValueError("give the name of a header of the client's own, such as x-user-id; the router uses this one itself")
    return name


class RouterConfig(FlagSettings):
    """Flags of `fairlead-router`."""

    model_config = SettingsConfigDict(cli_prog_name="fairlead-router")

    service_name: str = Field("fairlead", description="name of the InferenceService")
    served_model_name: str = Field("", description="model name that clients send (empty: the workers' model names)")
    host: str = Field("0.0.0.0", description="address to listen on")
    port: int = Field(8080, ge=0, le=65535, description="port to listen on (0: any free one)")
    ssl_certfile: str = Field("", description="PEM file of --port's certificate and its chain, reloaded when it changes (empty: no TLS)")
    ssl_keyfile: str = Field("", description="PEM file of the private key of --ssl-certfile")
    admin_port: OptionalPort = Field(
        None, description="port of /metrics and /fairlead/*, which --port then does not serve (empty: --port serves all; 0: any free one)"
    )
    worker_admin_port: OptionalPort = Field(None, description="the workers' FAIRLEAD_ADMIN_PORT (empty: they have none)")
    index_namespace: str = Field("", description="NS/NAME of the prefix index (empty: default/SERVICE_NAME)")
    redis_url: str = Field("", description="redis://... of the prefix index (empty: no index)", repr=False)
    redis_credentials: str = Field(
        "",
        description="folder with the files username, password, ca.crt, tls.crt, tls.key, sentinel-username and sentinel-password, each "
        "optional, read at each connection (empty: none)",
    )
    workers: str = Field(description="dns://HOST:PORT, file:///path (one host:port a line) or static://a:1,b:2")
    policy: RoutingPolicy = Field("PrefixAware", description=f"which worker is chosen ({DESCRIPTION})")
    session_header: str = Field(
        "x-session-id", description="header that names the session, for --policy Session and canaries, such as x-user-id"
    )
    canary_file: str = Field("", description="file with the canary's revision and weight, reloaded when it changes (empty: no canaries)")
    api_keys_file: str = Field("", description="file with tenants and hashed API keys, reloaded when it changes (empty: no authentication)")
    batch_url: str = Field("", description="URL of the batch server, which gets /v1/files and /v1/batches (empty: there is none)")
    batch_secret_file: str = Field("", description="file with the secret shared with the batch server, read at each use")
    responses_secret_file: str = Field(
        "", description="file with the secret for the keys of stored responses, the same in all routers (empty: one of this process)"
    )
    model_routes_file: str = Field(
        "", description="file with the models of other services, whose requests are sent to them; reloaded when it changes (empty: none)"
    )
    router_replicas: int = Field(1, ge=1, description="number of routers; without Redis each enforces this fraction of the token rates")
    forwarding_mode: Literal["proxy", "redirect"] = Field(
        "proxy", description="redirect: answer 307 with the worker's address, for clients inside the cluster"
    )
    index_mode: IndexMode = Field(
        "auto", description="PrefixAware queries Redis (remote) or keeps a copy (mirror); auto: a copy while it is small"
    )
    max_body_bytes: int = Field(8 * 1024 * 1024, ge=1024, description="largest request body, bytes; larger ones get 413")
    drain_timeout: float = Field(120.0, ge=0, description="seconds that requests in flight may take to finish after SIGTERM")
    drain_grace: float = Field(3.0, ge=0, description="seconds after SIGTERM in which new connections are still accepted: endpoints lag")
    request_timeout: float = Field(
        600.0, gt=0, description="seconds until an answer begins, over all attempts, and longest silence within it"
    )
    header_timeout: float = Field(10.0, gt=0, description="seconds for a request's headers to come; then 408")
    body_timeout: float = Field(60.0, gt=0, description="seconds for a request's body to come; then 408")
    max_connections: int = Field(10_000, ge=1, description="most connections of clients; further ones get 503")
    max_inflight_bytes: int = Field(256 * 1024 * 1024, ge=1024, description="most bytes of bodies kept until their answers begin")
    slo_classes: str = Field("", description="service classes, a JSON list with the keys of spec.slo.classes (empty: only batch)")
    default_slo_class: str = Field("", description="class of requests that name none and whose API key has none (empty: no class)")
    max_queue_requests: int = Field(1024, ge=0, description="most requests in the queue")
    queue_timeout: float = Field(60.0, ge=0, description="seconds that a request waits in the queue before 429")
    silence_timeout: float = Field(15.0, ge=2, description="seconds without a byte from a worker after which its streams end")
    hold_timeout: float | None = Field(
        None, ge=0, description="seconds that a request waits for a worker before 503 (empty: 30, and up to 600 while workers advance)"
    )
    ready_without_workers: bool = Field(False, description="ready before the first worker is: requests are held (scale to zero)")
    metrics_names: Literal["fairlead", "vllm"] = Field(
        "fairlead", description="vllm: add the metric names of vLLM's production-stack router"
    )
    poll_interval: float = Field(1.0, gt=0, description="seconds between discovery queries, and between health checks of a worker")
    log_level: LogLevel = Field("INFO", description="least important lines that are logged")
    log_format: LogFormat = Field("text", description="json: one JSON object a line, with the ids of the request and its trace")
    otlp_traces_endpoint: str = Field(
        "",
        description="URL of an OpenTelemetry collector, as in http://collector:4318 (empty: OTEL_EXPORTER_OTLP_ENDPOINT, else no traces)",
    )
    console: bool = Field(False, description="serve the web console at /ui, with the same API keys")
    allowed_origins: str = Field("", description="origins of web pages that may call (CORS), with commas; *: all (empty: none)")

    picker_port: int | None = Field(
        None, ge=0, le=65535, description="port of the endpoint picker for gateways (empty: none; 0: any free one)"
    )
    picker_tls: str = Field("self-signed", description="TLS of the picker port: self-signed, off, or a folder with tls.crt and tls.key")

    @field_validator("workers")
    @classmethod
    def _known_scheme(cls, value: str) -> str:
        if not value.startswith(("dns://", "file:///", "static://")):
            raise ValueError("give dns://HOST:PORT, file:///path or static://host:port,host:port")
        return value

    _readable_header = field_validator("session_header")(check_session_header)

    @field_validator("allowed_origins")
    @classmethod
    def _valid_origins(cls, value: str) -> str:
        parse_origins(value)
        return value

    @field_validator("slo_classes")
    @classmethod
    def _valid_classes(cls, value: str) -> str:
        parse_classes(value)
        return value

    @field_validator("default_slo_class")
    @classmethod
    def _known_class(cls, value: str, info: ValidationInfo) -> str:
        if "slo_classes" in info.data:  # else its own error is reported
            ServiceClasses(parse_classes(info.data["slo_classes"]), value)
        return value

    @model_validator(mode="after")
    def _complete_pair(self) -> Self:
        if bool(self.ssl_certfile) != bool(self.ssl_keyfile):
            raise ValueError("--ssl-certfile and --ssl-keyfile go together: give both, or none for plain HTTP")
        return self

    @property
    def service_classes(self) -> ServiceClasses:
        """Return the service classes, parsed."""
        return ServiceClasses(parse_classes(self.slo_classes), self.default_slo_class)

    @property
    def namespace(self) -> str:
        return self.index_namespace or f"default/{self.service_name}"

    @property
    def redis(self) -> RedisAccess | None:
        """Access to Redis; None without `--redis-url`. Raises ValueError for an invalid combination."""
        return RedisAccess(self.redis_url, self.redis_credentials) if self.redis_url else None

    def describe(self) -> dict[str, object]:
        """Return the configuration for the log at start, without the password of the Redis URL."""
        return self.model_dump() | {"redis_url": redact_url(self.redis_url)}


def read_config(arguments: list[str]) -> RouterConfig:
    """Read the command line and the environment. Raises SettingsError for an unknown flag, ValidationError for a bad value."""
    return RouterConfig(_cli_parse_args=arguments)
