"""The worker's configuration: one frozen object, built once from flags and `FAIRLEAD_*` environment variables."""

import re
import socket
import sys
from contextlib import suppress
from functools import cached_property
from ipaddress import IPv6Address
from pathlib import Path, PurePosixPath
from typing import Annotated, Literal, Self
from urllib.parse import unquote

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, ValidationInfo, field_validator, model_validator
from pydantic_settings import BaseSettings, EnvSettingsSource, NoDecode, PydanticBaseSettingsSource, SettingsConfigDict

from fairlead_common.discovery import create_source
from fairlead_common.scheduling_policy import ORDERS, PolicyName
from fairlead_common.telemetry.logs import LogFormat, LogLevel
from fairlead_index.redis.access import RedisAccess, parse_url
from fairlead_worker.config.api_files import AllowedOrigins, ApiKeyFile, ChatTemplateFile
from fairlead_worker.config.command_line import describe_value, exit_with_errors, hide_password, parse_flags
from fairlead_worker.config.leader_worker_set import GroupEnvironment
from fairlead_worker.config.limits import Limits
from fairlead_worker.config.options import ENV_PREFIX, env_only, flag, setting_name, variable_name
from fairlead_worker.config.speculative import SpeculativeConfig
from fairlead_worker.config.values import parse_json, parse_json_or_list, to_model_uri, to_upper
from fairlead_worker.parsing.families import REASONING_PARSERS, TOOL_CALL_PARSERS, select_parsers
from fairlead_worker.parsing.registry import reasoning_plugins, tool_call_plugins

NonNegative = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
Port = Annotated[int, Field(ge=0, le=65535)]
NODES_PORT = 8001
"""Default port at which the leader of several nodes listens for the others."""
MAX_PORT = 65_535
MIN_SECRET_LENGTH = 16
ADAPTER_NAME = r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,252}"
"""The rule of model names in the manifest, because adapter names go into URLs and command lines too."""


class WorkerConfig(BaseSettings):
    """All settings of a worker. A field with a topic is a flag; every field is also an environment variable. A flag wins."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, frozen=True, extra="ignore")

    # Model
    model: Annotated[
        str,
        AfterValidator(to_model_uri),
        flag(
            "Model",
            "model to serve: a folder, ORG/NAME on the hub, hf://…, s3:// or gs://bucket/folder, oci://image[#folder] or file:///path",
        ),
    ]
    served_model_name: Annotated[str, flag("Model", "name of the model in the API, or several with commas; default: from --model")] = ""
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        flag("Model", "dtype of weights and computation; auto: the checkpoint's, or float32 on a CPU where that is faster"),
    ] = "auto"
    quantization: Annotated[
        Literal["none", "int8", "fp8", "int4"],
        flag("Model", "quantize linear layers while loading: int8 or int4 on a CPU, fp8 or int4 (torchao) on a GPU"),
    ] = "none"
    max_model_len: Annotated[NonNegative, flag("Model", "tokens of prompt and output together, at most; 0: the model's limit")] = 0
    generation_config: Annotated[
        str,
        flag("Model", "sampling defaults: auto, the model's generation_config.json; none, OpenAI's; or a folder with this file"),
    ] = "auto"

    # API server
    host: Annotated[str, flag("API server", "address to listen on")] = "0.0.0.0"
    port: Annotated[Port, flag("API server", "port to listen on; 0: any free one")] = 8000
    api_key_file: Annotated[
        ApiKeyFile, flag("API server", "file with the API keys that requests must carry, one a line; read again when it changes")
    ] = ""
    allowed_origins: Annotated[
        AllowedOrigins, flag("API server", "origins of web pages that may call (CORS), with commas; *: all; default: none")
    ] = ""
    drain_timeout: Annotated[float, flag("API server", "seconds for running requests to finish after SIGTERM", ge=0)] = 120

    # Chat and embeddings
    chat_template: Annotated[
        ChatTemplateFile, flag("Chat and embeddings", "file with a chat template (Jinja); default: the model's own")
    ] = ""
    tool_call_parser: Annotated[
        str, flag("Chat and embeddings", f"format of tool calls; auto: from the chat template ({', '.join(TOOL_CALL_PARSERS)})")
    ] = "auto"
    reasoning_parser: Annotated[
        str, flag("Chat and embeddings", f"format of reasoning; auto: from the chat template ({', '.join(REASONING_PARSERS)})")
    ] = "auto"
    trust_request_chat_template: Annotated[
        bool, flag("Chat and embeddings", "accept chat_template in requests. A template is a program: enable it only for trusted clients")
    ] = False
    pooling: Annotated[
        Literal["auto", "last", "mean", "cls", "none"],
        flag("Chat and embeddings", "pooling of embeddings; auto: from the model's files, else last (encoders: mean); none: no embeddings"),
    ] = "auto"
    matryoshka: Annotated[
        bool, flag("Chat and embeddings", "accept `dimensions` for embeddings even if the model's config does not allow it")
    ] = False

    # Scheduling
    scheduling_policy: Annotated[
        PolicyName, flag("Scheduling", f"order of waiting requests of equal priority, by what comes first: {ORDERS}")
    ] = "lpm"
    max_num_seqs: Annotated[Positive, flag("Scheduling", "sequences in one step, at most")] = 256
    chunked_prefill_size: Annotated[
        int,
        flag(
            "Scheduling",
            "tokens of a step that has both decodes and prefill, at most; longer prompts are cut. "
            "0: a GPU's are measured, 512 on a CPU; -1: prompts are not cut",
            ge=-1,
        ),
    ] = 0
    enable_mixed_chunk: Annotated[bool, flag("Scheduling", "compute prefill and decodes in one step; off: in alternating steps")] = True
    max_prefill_tokens: Annotated[Positive, flag("Scheduling", "prompt tokens in one step, at most, without cached ones")] = 8192
    prefill_max_requests: Annotated[NonNegative, flag("Scheduling", "prompts in one step, at most; 0: no limit")] = 0
    itl_target_ms: Annotated[
        float,
        flag(
            "Scheduling",
            "target time of a step with decodes, in milliseconds; chunks of prefill are made to fit. "
            "0: none; a CPU then uses three decode steps",
            ge=0,
            allow_inf_nan=False,
        ),
    ] = 0

    # KV cache
    page_size: Annotated[Positive, flag("KV cache", "tokens in a KV page")] = 16
    block_tokens: Annotated[Positive, flag("KV cache", "tokens in a block of the prefix index: a multiple of --page-size")] = 64
    kv_pages: Annotated[NonNegative, flag("KV cache", "number of KV pages; 0: as many as fit into the memory")] = 0
    kv_cache_memory_bytes: Annotated[NonNegative, flag("KV cache", "bytes of KV cache; 0: as much as fits into the memory")] = 0
    mem_fraction_static: Annotated[
        float,
        flag("KV cache", "share of a GPU's memory for weights and KV pages, at most; less if the largest step needs the rest", gt=0, le=1),
    ] = 0.92
    kv_cache_dtype: Annotated[
        Literal["auto", "fp8"],
        flag(
            "KV cache",
            "dtype of the KV cache; auto: the model's; fp8 (e4m3, GPUs): half of it, with the checkpoint's scales, else 1",
        ),
    ] = "auto"
    host_kv_cache_bytes: Annotated[
        NonNegative, flag("KV cache", "bytes of host memory for KV pages evicted from a GPU; 0: none. Ignored on a CPU")
    ] = 0

    # Execution
    attention_backend: Annotated[
        Literal["auto", "flashinfer", "native", "cpu", "reference"],
        flag(
            "Execution",
            "attention kernels: FlashInfer (GPU), the compiled ones (CPU), torch (CPU), or reference: plain torch, slow, any device. "
            "auto: the fastest available",
        ),
    ] = "auto"
    overlap: Annotated[
        Literal["auto", "on", "off"],
        flag("Execution", "schedule a step while the one before it runs on the GPU; auto: on a GPU"),
    ] = "auto"
    max_cudagraph_capture_size: Annotated[
        NonNegative,
        flag("Execution", "decodes of the largest CUDA graph, at most (FlashInfer on a GPU, after a start-up trial); 0: no CUDA graphs"),
    ] = 512
    threads: Annotated[NonNegative, flag("Execution", "CPU threads of the engine; 0: from its cores and CPU quota")] = 0
    deterministic: Annotated[
        bool, flag("Execution", "batch-invariant kernels: tokens do not depend on other requests or on the cache; tested at the start")
    ] = False

    # Parallelism
    tensor_parallel_size: Annotated[Positive, flag("Parallelism", "devices that share the model, over all nodes")] = 1
    nnodes: Annotated[int, flag("Parallelism", "nodes that share the model", ge=1, le=64)] = 1
    node_rank: Annotated[NonNegative, flag("Parallelism", "number of this node; 0: the leader, which serves")] = 0
    master_addr: Annotated[str, flag("Parallelism", f"HOST[:PORT] of the leader, for --nnodes above 1; default port: {NODES_PORT}")] = ""

    # LoRA
    lora_modules: Annotated[
        list[str],
        BeforeValidator(lambda value: value.split(",") if isinstance(value, str) else value),
        NoDecode,
        flag("LoRA", "adapters to load at the start: several after one flag, or the flag again; with commas in the variable"),
    ] = []
    max_loras: Annotated[NonNegative, flag("LoRA", "loaded adapters, at most; 0: no LoRA")] = 8
    max_lora_rank: Annotated[Positive, flag("LoRA", "rank of an adapter, at most")] = 64

    speculative_config: Annotated[
        SpeculativeConfig | None,
        BeforeValidator(parse_json),
        NoDecode,
        flag("Execution", f"speculative decoding: JSON object with the keys {', '.join(SpeculativeConfig.model_fields)}; default: off"),
    ] = None

    # Limits
    max_waiting_requests: Annotated[
        NonNegative, flag("Limits", "sequences that wait for their first token, at most; further ones get 429; 0: no limit")
    ] = 1024
    limits: Annotated[
        Limits,
        BeforeValidator(parse_json_or_list),
        NoDecode,
        flag("Limits", f"JSON object or KEY=VALUE,KEY=VALUE with the keys {', '.join(Limits.model_fields)}"),
    ] = Limits()

    # Observability
    log_level: Annotated[LogLevel, BeforeValidator(to_upper), flag("Observability", "least important lines that are logged")] = "INFO"
    log_format: Annotated[LogFormat, flag("Observability", "json: one object a line, with the ids of the request and its trace")] = "text"
    otlp_traces_endpoint: Annotated[
        str,
        flag(
            "Observability",
            "URL of an OpenTelemetry collector, as in http://collector:4318; default: OTEL_EXPORTER_OTLP_ENDPOINT, else no traces",
        ),
    ] = ""
    metrics_names: Annotated[Literal["fairlead", "vllm"], flag("Observability", "vllm: add metrics with the names of vLLM")] = "fairlead"
    trace_schedule: Annotated[str, flag("Observability", "file to write each step to, for `fairlead schedule`")] = ""

    # Settings without a flag
    pod_name: Annotated[str, env_only("name of this worker in the index and in responses; default: the host name")] = ""
    advertise: Annotated[str, env_only("HOST:PORT at which routers reach this worker; default: from --host and --port")] = ""
    admin_port: Annotated[Port | None, env_only("port of the admin paths, which --port then refuses; 0: any free one")] = None
    canary: Annotated[str, env_only("revision of which this worker is the canary")] = ""
    termination_log: Annotated[str, env_only("file for the reason of a failure")] = "/dev/termination-log"
    model_cache: Annotated[str, env_only("folder of downloaded models; default: HF_HOME, or ~/.cache/huggingface")] = ""
    index_namespace: Annotated[str, env_only("NAMESPACE/NAME of the service in the prefix index")] = ""
    redis_url: Annotated[str, env_only("redis://… of the prefix index; default: no index")] = ""
    redis_credentials: Annotated[
        str, env_only("folder with the files username, password, ca.crt, tls.crt and tls.key, each optional, read at each connection")
    ] = ""
    nodes_secret: Annotated[
        str, env_only(f"shared secret of the nodes of a model, {MIN_SECRET_LENGTH} characters or more, for --nnodes above 1")
    ] = ""
    peers: Annotated[str, env_only("the service's workers for prefix warm-up: dns://HOST:PORT, file:///path or static://HOST:PORT")] = ""
    warmup_tokens: Annotated[NonNegative, env_only("hot prefix tokens of other workers that are computed before this one is ready")] = 0
    warmup_timeout: Annotated[float, env_only("seconds that prefix warm-up may take", gt=0)] = 10
    allow_runtime_lora_updating: Annotated[
        bool, env_only("serve POST /v1/load_lora_adapter and /v1/unload_lora_adapter; for trusted networks")
    ] = False
    native_decoder: Annotated[bool, env_only("compute a step in one native call where possible (CPU); false: layer by layer")] = True
    fuse: Annotated[Literal["auto", "off"], env_only("fuse norms, activations, rope and projections on a GPU; off: torch's operations")] = (
        "auto"
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Return the sources, first the strongest: flags, `FAIRLEAD_*`, LeaderWorkerSet. An empty variable counts as unset."""
        return init_settings, EnvSettingsSource(settings_cls, env_ignore_empty=True), GroupEnvironment(settings_cls)

    @field_validator("generation_config")
    @classmethod
    def _check_generation_config(cls, value: str) -> str:
        if value not in ("auto", "none") and not Path(value, "generation_config.json").is_file():
            raise ValueError("is neither auto, nor none, nor a folder with generation_config.json")
        return value

    @field_validator("tool_call_parser", "reasoning_parser")
    @classmethod
    def _check_parser(cls, value: str, info: ValidationInfo) -> str:
        calls = info.field_name == "tool_call_parser"
        names = (*TOOL_CALL_PARSERS, *tool_call_plugins()) if calls else (*REASONING_PARSERS, *reasoning_plugins())
        if value not in names:
            raise ValueError(f"is none of {', '.join(names)}")
        return value

    @field_validator("lora_modules")
    @classmethod
    def _check_adapters(cls, value: list[str]) -> list[str]:
        for one in value:
            name, _, uri = one.partition("=")
            if not re.fullmatch(ADAPTER_NAME, name) or not uri:
                raise ValueError(f"{one!r} is not NAME=URI, as in sql=hf://org/name or sql=file:///path")
        if len({one.partition("=")[0] for one in value}) < len(value):
            raise ValueError("two adapters have one name; requests choose by name")
        return value

    @field_validator("redis_url")
    @classmethod
    def _check_redis_url(cls, value: str) -> str:
        if value:
            parse_url(value)
        return value

    @field_validator("peers")
    @classmethod
    def _check_peers(cls, value: str) -> str:
        if value:
            create_source(value, variable_name("peers"))
        return value

    @field_validator("advertise")
    @classmethod
    def _check_address(cls, value: str) -> str:
        host, _, port = value.rpartition(":")
        if ":" in host and "[" not in host:
            # A pod's own address comes without brackets from the downward API: fd00::7 and 8000 meet as fd00::7:8000.
            with suppress(ValueError):
                value = f"[{IPv6Address(host).compressed}]:{port}"
        if value and not (re.fullmatch(r"(\[[0-9a-fA-F:]+\]|[^:\s/]+):\d{1,5}", value) and 0 < int(value.rpartition(":")[2]) <= MAX_PORT):
            raise ValueError("must be HOST:PORT, as in 10.0.0.7:8000 or [fd00::7]:8000")
        return value

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        if self.block_tokens % self.page_size:
            raise ValueError(
                f"--block-tokens {self.block_tokens} is not a multiple of --page-size {self.page_size}; "
                f"try --block-tokens {-(-self.block_tokens // self.page_size) * self.page_size}"
            )
        self._check_nodes()
        if self.deterministic and (self.tensor_parallel_size > 1 or self.lora_modules or self.allow_runtime_lora_updating):
            raise ValueError(
                "--deterministic is for one device and without LoRA adapters: "
                "leave out --tensor-parallel-size, --lora-modules and FAIRLEAD_ALLOW_RUNTIME_LORA_UPDATING, or --deterministic"
            )
        if self.itl_target_ms and self.chunked_prefill_size < 0:
            raise ValueError("--itl-target-ms cuts prompts into chunks; leave out --chunked-prefill-size -1")
        if len(self.lora_modules) > self.max_loras:
            raise ValueError(f"--lora-modules names {len(self.lora_modules)}, and --max-loras is {self.max_loras}: raise --max-loras")
        if same := sorted(self.loras.keys() & set(self.names)):
            raise ValueError(f"--lora-modules {same[0]}=…: {same[0]!r} is the model's own name; give the adapter another")
        select_parsers(self.tool_call_parser, self.reasoning_parser, ())
        if self.redis_url and not self.index_namespace:
            raise ValueError("FAIRLEAD_REDIS_URL needs FAIRLEAD_INDEX_NAMESPACE too: set it to NAMESPACE/NAME")
        _ = self.redis
        return self

    def _check_nodes(self) -> None:
        if self.nnodes == 1:
            if self.node_rank or self.master_addr:
                raise ValueError("--node-rank and --master-addr are for a model on several nodes: give --nnodes too")
            return
        if self.tensor_parallel_size % self.nnodes:
            raise ValueError(
                f"--tensor-parallel-size {self.tensor_parallel_size} is not a multiple of --nnodes {self.nnodes}: "
                "each node must have the same number of ranks"
            )
        if self.node_rank >= self.nnodes:
            raise ValueError(f"--node-rank {self.node_rank} is not below --nnodes {self.nnodes}: nodes are numbered from 0")
        if not re.fullmatch(r"(\[[0-9a-fA-F:]+\]|[^:\s/]+)(:\d{1,5})?", self.master_addr) or not 0 < self.leader_address[1] <= MAX_PORT:
            raise ValueError(f"--nnodes {self.nnodes} needs --master-addr HOST[:PORT], the same on all of them (got {self.master_addr!r})")
        if len(self.nodes_secret) < MIN_SECRET_LENGTH:
            raise ValueError(
                f"--nnodes {self.nnodes} needs a shared secret: set FAIRLEAD_NODES_SECRET to the same {MIN_SECRET_LENGTH} characters "
                "or more on all of them"
            )

    @property
    def local_ranks(self) -> int:
        """Return the number of ranks of this node."""
        return self.tensor_parallel_size // self.nnodes

    @property
    def leader_address(self) -> tuple[str, int]:
        """Return the leader's host (an IPv6 address without brackets) and port."""
        host, _, port = self.master_addr.rpartition(":") if re.search(r":\d+$", self.master_addr) else (self.master_addr, "", "")
        return host.strip("[]"), int(port or NODES_PORT)

    @property
    def redis(self) -> RedisAccess | None:
        """Return how to reach Redis, or None without an index. Raises ValueError for settings that can never work together."""
        return RedisAccess(self.redis_url, self.redis_credentials) if self.redis_url else None

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Return the names that requests may give as `model`. Responses show the first one by default."""
        given = tuple(name.strip() for name in self.served_model_name.split(",") if name.strip())
        if given:
            return given
        scheme, _, rest = self.model.partition("://")
        if scheme == "oci":  # the repository, without tag, digest and folder
            return (PurePosixPath(rest.partition("#")[0].partition("@")[0]).name.partition(":")[0],)
        name = rest.partition("@")[0] if scheme == "hf" else PurePosixPath(unquote(rest)).name
        return (name.removesuffix(".gguf"),)

    @property
    def loras(self) -> dict[str, str]:
        """Return the adapters to load at the start: name -> URI."""
        return {name: uri for name, _, uri in (one.partition("=") for one in self.lora_modules)}

    @cached_property
    def pod(self) -> str:
        """Return the name of this worker in the index and in responses."""
        return self.pod_name or socket.gethostname()

    def address(self, port: int) -> str:
        """Return HOST:PORT at which routers reach this worker. `port`: the bound port."""
        if self.advertise:
            return self.advertise
        host = socket.gethostname() if self.host in ("", "0.0.0.0", "::") else self.host
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def describe_settings(self) -> dict[str, str]:
        """Return all settings as text, without passwords."""
        return {name: describe_value(hide_password(name, getattr(self, name))) for name in type(self).model_fields}

    def describe(self) -> str:
        """Return all settings for the log, without passwords: `--flag=value`, and `VARIABLE=value` where there is no flag."""
        shown = self.describe_settings()
        return " ".join(f"{setting_name(name, field)}={shown[name]}" for name, field in type(self).model_fields.items())

    @classmethod
    def from_command_line(cls, arguments: list[str] | None = None) -> "WorkerConfig":
        """Read flags and environment. A bad value ends the process with status 2 and a line that names its flag or variable."""
        flags = parse_flags(cls.model_fields, sys.argv[1:] if arguments is None else arguments)
        try:
            return cls(**flags)
        except ValidationError as error:
            exit_with_errors(error, cls.model_fields)
