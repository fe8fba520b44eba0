"""The agent's configuration: flags, each with an environment variable `FAIRLEAD_<FLAG>` (flags win)."""

import re
import socket
from typing import Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator
from pydantic_settings import BaseSettings, EnvSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

from fairlead_agent.remotes import AllowedRemotes
from fairlead_common.flags import FlagSettings, OptionalPort, exit_on_bad_flags
from fairlead_common.telemetry.logs import LogFormat, LogLevel
from fairlead_index.redis.access import RedisAccess, parse_url, redact_url

Runtime = Literal["vllm", "sglang"]
RUNTIME_NAMES: dict[Runtime, str] = {"vllm": "vLLM", "sglang": "SGLang"}
_ENDPOINT = r"(tcp://(\*|[^/\s:]+|\[[^\]]+\]):\d{1,5}|ipc://\S+)"


class AgentConfig(FlagSettings):
    """Flags of `fairlead-agent`."""

    model_config = SettingsConfigDict(cli_prog_name="fairlead-agent")

    runtime: Runtime = Field("vllm", description="the engine")
    model: str = Field(description="the engine's model: a folder, file:///path, ORG/NAME or hf://ORG/NAME; its tokenizer is read")
    served_model_name: str = Field("", description="name of the model in the API (empty: what the engine answers)")
    engine_url: str = Field("http://127.0.0.1:8100", description="URL of the engine's HTTP server")
    kv_events: str = Field("tcp://127.0.0.1:5557", description="`endpoint` of the engine's --kv-events-config (empty: no events)")
    kv_replay: str = Field("tcp://127.0.0.1:5558", description="`replay_endpoint` of the engine's --kv-events-config (empty: none)")
    block_tokens: int = Field(0, ge=0, description="tokens of a block of the prefix index, a multiple of the engine's (0: the engine's)")
    host: str = Field("0.0.0.0", description="address to listen on")
    port: int = Field(8000, ge=0, le=65535, description="port to listen on (0: any free one)")
    admin_port: OptionalPort = Field(
        None,
        description="port of the admin paths and of the engine's paths other than inference (empty: --port serves the admin paths, and "
        "nothing the others)",
    )
    drain_timeout: float = Field(120.0, ge=0, description="seconds for running requests to finish after SIGTERM")
    max_body_bytes: int = Field(32 * 1024 * 1024, ge=1024, description="largest request body, bytes; larger ones get 413")
    max_inflight_bytes: int = Field(
        256 * 1024 * 1024, ge=1024, description="most bytes of bodies kept until their answers begin; beyond it 429"
    )
    allowed_remotes: str = Field(
        "",
        description="what requests may make the engine connect to, with commas: SCHEME://HOST of media, such as https://*.example.com, and "
        "fields such as kv_transfer_params (empty: nothing; data: URLs need no permission)",
    )
    pod_name: str = Field("", description="name of this worker in the index and in responses (empty: the host name)")
    advertise: str = Field("", description="HOST:PORT at which routers reach this worker (empty: from --host and --port)")
    canary: str = Field("", description="revision of which this worker is the canary")
    termination_log: str = Field("/dev/termination-log", description="file for the reason of a failure")
    index_namespace: str = Field("", description="NAMESPACE/NAME of the service in the prefix index")
    redis_url: str = Field("", description="redis://... of the prefix index (empty: no index)", repr=False)
    redis_credentials: str = Field(
        "",
        description="folder with the files username, password, ca.crt, tls.crt, tls.key, sentinel-username and sentinel-password, each "
        "optional, read at each connection (empty: none)",
    )
    log_level: LogLevel = Field("INFO", description="least important lines that are logged")
    log_format: LogFormat = Field("text", description="json: one JSON object a line")

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Let an empty variable count as unset, as manifests leave it. An empty flag is a value: `--kv-events=` means no events."""
        return init_settings, EnvSettingsSource(settings_cls, env_ignore_empty=True)

    @field_validator("engine_url")
    @classmethod
    def _check_url(cls, value: str) -> str:
        parts = urlsplit(value)
        _ = parts.port  # raises ValueError for one that is no number
        if parts.scheme != "http" or not parts.hostname or parts.path.strip("/"):
            raise ValueError("must be http://HOST:PORT without a path, as in http://127.0.0.1:8100")
        return value.rstrip("/")

    @field_validator("allowed_remotes")
    @classmethod
    def _check_remotes(cls, value: str) -> str:
        AllowedRemotes(value)
        return value

    @field_validator("kv_events", "kv_replay")
    @classmethod
    def _check_endpoint(cls, value: str) -> str:
        if value and not re.fullmatch(_ENDPOINT, value):
            raise ValueError("must be tcp://HOST:PORT or ipc:///path, as in the engine's --kv-events-config")
        return value

    @field_validator("advertise")
    @classmethod
    def _check_address(cls, value: str) -> str:
        host, _, port = value.rpartition(":")
        if value and ":" in host and "[" not in host:  # a pod's IPv6 address comes without brackets from the downward API
            value = f"[{host}]:{port}"
        if value and not re.fullmatch(r"(\[[0-9a-fA-F:]+\]|[^:\s/]+):\d{1,5}", value):
            raise ValueError("must be HOST:PORT, as in 10.0.0.7:8000 or [fd00::7]:8000")
        return value

    @model_validator(mode="after")
    def _check_redis(self) -> Self:
        if self.redis_url:
            parse_url(self.redis_url)
            if not self.index_namespace:
                raise ValueError("--redis-url needs --index-namespace too: give NAMESPACE/NAME")
        _ = self.redis
        return self

    @model_validator(mode="after")
    def _check_bodies(self) -> Self:
        if self.max_inflight_bytes < self.max_body_bytes:
            raise ValueError(f"--max-inflight-bytes must be at least --max-body-bytes, {self.max_body_bytes}: one body must fit")
        return self

    @property
    def redis(self) -> RedisAccess | None:
        """Return how to reach Redis, or None without an index. Raises ValueError for settings that can never work together."""
        return RedisAccess(self.redis_url, self.redis_credentials) if self.redis_url else None

    @property
    def pod(self) -> str:
        return self.pod_name or socket.gethostname()

    @property
    def runtime_name(self) -> str:
        return RUNTIME_NAMES[self.runtime]

    def address(self, port: int) -> str:
        """Return HOST:PORT at which routers reach this worker. `port`: the bound port."""
        if self.advertise:
            return self.advertise
        host = socket.gethostname() if self.host in ("", "0.0.0.0", "::") else self.host
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def describe(self) -> dict[str, object]:
        """Return the configuration for the log at start, without the password of the Redis URL."""
        return self.model_dump() | {"redis_url": redact_url(self.redis_url)}


def read_config(arguments: list[str]) -> AgentConfig:
    """Read flags and environment. A bad value ends the process with status 2 and lines that name the flags."""
    with exit_on_bad_flags("fairlead-agent"):
        return AgentConfig(_cli_parse_args=arguments)
