"""The worker's configuration: one frozen object, built once from flags and `FAIRLEAD_*` environment variables."""

import re
import socket
import sys
from contextlib import suppress
from ipaddress import IPv6Address
from pathlib import PurePosixPath
from typing import Annotated, Literal, NoReturn, Self

from pydantic import BeforeValidator, Field, ValidationError, ValidationInfo, field_validator, model_validator
from pydantic_settings import BaseSettings, EnvSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

from fairlead_common.discovery import create_source
from fairlead_index.groups import MOST_GROUPS
from fairlead_index.redis.access import RedisAccess, parse_url, redact_url
from fairlead_worker.leader_worker_set import GroupEnvironment
from fairlead_worker.parsing.families import REASONING_PARSERS, TOOL_CALL_PARSERS, select_parsers

NonNegative = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
NODES_PORT = 8001
"""Where the leader of several nodes listens for the others."""
MAX_PORT = 65_535
MIN_SECRET_LENGTH = 16
ADAPTER_NAME = r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,252}"
"""As a model's name in the manifest: it goes into URLs and command lines."""


class WorkerConfig(BaseSettings):
    """Flags of `fairlead-worker`. Each is also `FAIRLEAD_<FLAG>` in the environment; flags win, the last one given wins."""

    model_config = SettingsConfigDict(
        env_prefix="FAIRLEAD_",
        frozen=True,
        extra="ignore",
        cli_prog_name="fairlead-worker",
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_hide_none_type=True,
    )

    model: Annotated[str, Field(description="model to serve: hf://org/name[@revision], s3://bucket/folder or file:///path")]
    model_cache: Annotated[str, Field(description="folder that downloads are kept in; empty: HF_HOME, or ~/.cache/huggingface")] = ""
    served_model_name: Annotated[str, Field(description="name(s) in the API, comma-separated; empty: derived from --model")] = ""
    host: Annotated[str, Field(description="address to listen on")] = "0.0.0.0"
    port: Annotated[int, Field(ge=0, le=65535, description="port to listen on; 0: any free one")] = 8000
    admin_port: Annotated[
        Annotated[int, Field(ge=0, le=65535)] | None,
        BeforeValidator(lambda value: None if value == "" else value),
        Field(description="port of admin paths, which --port then does not serve; empty: --port serves all; 0: any free one"),
    ] = None
    pod_name: Annotated[str, Field(description="this worker's name in the index and in answers; empty: the host name")] = ""
    advertise: Annotated[str, Field(description="HOST:PORT at which the router reaches this worker; empty: derived")] = ""
    canary: Annotated[str, Field(description="the revision that this worker is the canary of; empty: none")] = ""
    index_namespace: Annotated[str, Field(description="NS/NAME of the service in the index")] = ""
    index_groups: Annotated[int, Field(ge=1, le=MOST_GROUPS, description="parts of the index, as spec.routing.indexGroups")] = 1
    redis_url: Annotated[str, Field(description="redis://… of the index; empty: no index")] = ""
    redis_username: Annotated[str, Field(description="user of Redis; empty: default, or the URL's")] = ""
    redis_username_file: Annotated[str, Field(description="file with the user's name, read at each connection")] = ""
    redis_password_file: Annotated[str, Field(description="file with its password, read at each connection")] = ""
    redis_ca_file: Annotated[str, Field(description="PEM of the authorities to verify rediss:// by; empty: the system's")] = ""
    redis_cert_file: Annotated[str, Field(description="PEM of a client certificate for rediss://")] = ""
    redis_key_file: Annotated[str, Field(description="PEM of its private key")] = ""
    page_size: Annotated[Positive, Field(description="tokens in a KV page")] = 16
    block_tokens: Annotated[Positive, Field(description="tokens in a block of the index, a multiple of --page-size")] = 64
    max_model_len: Annotated[NonNegative, Field(description="most tokens of prompt and output; 0: the model's own")] = 0
    max_num_seqs: Annotated[Positive, Field(description="most requests in one step")] = 256
    chunked_prefill_size: Annotated[
        int, Field(description="most prompt tokens of a step beside decodes, which count too; 0 or less: off")
    ] = 512
    idle_prefill_chunks: Annotated[
        Positive, Field(description="chunks of --chunked-prefill-size that a step may prefill while nothing decodes")
    ] = 5
    enable_mixed_chunk: Annotated[bool, Field(description="decodes ride along in steps with prefill; off: a step is one or the other")] = (
        True
    )
    itl_target_ms: Annotated[
        float,
        Field(
            ge=0,
            allow_inf_nan=False,
            description="milliseconds of a step with decodes that prefill keeps to; 0: the fixed chunk size, less on a slow CPU",
        ),
    ] = 0
    max_waiting_requests: Annotated[
        NonNegative, Field(description="sequences that may wait for their first token; further ones get 429; 0: no bound")
    ] = 1024
    max_prefill_tokens: Annotated[Positive, Field(description="most prompt tokens in a step")] = 8192
    prefill_max_requests: Annotated[NonNegative, Field(description="most prompts computed in one step; 0: no limit")] = 0
    dedupe_tokens: Annotated[
        NonNegative, Field(description="tokens of the shortest prefix that is shared within the step that computes it; 0: none is")
    ] = 32
    kv_pages: Annotated[NonNegative, Field(description="KV pages; 0: from memory")] = 0
    kv_cache_bytes: Annotated[NonNegative, Field(description="bytes of KV cache; 0: from memory")] = 0
    mem_fraction_static: Annotated[
        float,
        Field(gt=0, le=1, description="of a GPU's memory for weights and KV pages, at most; less where the largest step needs the rest"),
    ] = 0.92
    host_kv_cache_bytes: Annotated[
        NonNegative, Field(description="bytes of host memory for pages evicted from the GPU; 0: none; on a CPU ignored with a warning")
    ] = 0
    attention_backend: Literal["auto", "flashinfer", "native", "cpu", "reference"] = "auto"
    overlap: Annotated[
        Literal["auto", "on", "off"],
        Field(description="a step is launched before the one before it is read; auto: off until it has been measured on GPUs"),
    ] = "auto"
    cuda_graph_max_batch: Annotated[
        NonNegative, Field(description="decodes of a step that is replayed as a CUDA graph, at most (FlashInfer on a GPU); 0: no graphs")
    ] = 0
    native_decoder: Annotated[
        bool,
        Field(description="a step of a known decoder is one native call (CPU, attention backend native); off: the model's own modules"),
    ] = True
    fuse: Annotated[
        Literal["auto", "off"],
        Field(description="on a GPU: norms with their residual, gated activations and rope in one kernel each, projections stacked"),
    ] = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    quantization: Annotated[
        Literal["none", "int8", "fp8", "int4"],
        Field(description="weights of linear layers, made so at load: int8 or int4 on a CPU; fp8 or int4 by torchao on a GPU"),
    ] = "none"
    tensor_parallel: Annotated[Positive, Field(description="devices that share one model: of this pod, or of --nodes pods")] = 1
    nodes: Annotated[int, Field(ge=1, le=64, description="pods that share one model, each on a node of its own")] = 1
    node_rank: Annotated[NonNegative, Field(description="which of --nodes this is; 0: the leader, which serves")] = 0
    leader: Annotated[str, Field(description=f"HOST[:PORT] of the leader, for --nodes above 1; the port: {NODES_PORT}")] = ""
    nodes_secret: Annotated[
        str,
        Field(description="what the nodes of a model know each other by; best as FAIRLEAD_NODES_SECRET: process lists show flags"),
    ] = ""
    drain_timeout: Annotated[float, Field(ge=0, description="seconds for running streams to finish after SIGTERM")] = 120
    lease_seconds: Annotated[float, Field(gt=0, description="seconds after which the index forgets a silent worker")] = 10
    threads: Annotated[NonNegative, Field(description="CPU threads of the engine; 0: from its cores and CPU quota")] = 0
    termination_log: Annotated[str, Field(description="file for the reason of a failure; empty: none")] = "/dev/termination-log"
    speculative_method: Annotated[
        Literal["none", "ngram", "draft"],
        Field(description="who guesses tokens ahead: nobody, a look-up in the request's own text, or --speculative-model"),
    ] = "none"
    speculative_num_tokens: Annotated[int, Field(ge=1, le=64, description="most tokens guessed ahead of one request in a step")] = 5
    speculative_ngram_min: Annotated[Positive, Field(description="tokens that must have been there before for a look-up")] = 2
    speculative_ngram_max: Annotated[Positive, Field(description="tokens compared to choose among earlier places")] = 5
    speculative_model: Annotated[str, Field(description="draft model with the same tokenizer: hf://org/name or file:///path")] = ""
    lora: Annotated[
        list[str], Field(description="LoRA adapter loaded before the worker is ready, NAME=URI; may be given several times")
    ] = []
    max_loras: Annotated[NonNegative, Field(description="LoRA adapters loaded at once, at most; 0: none are served")] = 8
    max_lora_rank: Annotated[Positive, Field(description="largest rank of an adapter that is served")] = 64
    allow_runtime_lora_updating: Annotated[
        bool, Field(description="POST /v1/load_lora_adapter and /v1/unload_lora_adapter work; for those alone who may reach this port")
    ] = False
    policy: Annotated[Literal["lpm", "fcfs", "priority", "fair"], Field(description="order of admission")] = "lpm"
    trace_schedule: Annotated[str, Field(description="file for each step's plan, for `fairlead schedule`; empty: none")] = ""
    profile_steps: Annotated[int, Field(ge=0, le=10_000, description="steps whose time is told by kind in --profile-file; 0: none")] = 0
    profile_file: Annotated[str, Field(description="JSON of --profile-steps; its words are in the log too")] = "/tmp/fairlead-profile.json"
    deterministic: Annotated[
        bool, Field(description="same tokens alone, in company, cold and warm: kernels whose rows do not depend on company; tried at start")
    ] = False
    generation_config: Annotated[
        Literal["auto", "none"],
        Field(description="auto: what a request leaves out is as the model's generation_config.json says; none: as OpenAI says"),
    ] = "auto"
    pooling: Annotated[
        Literal["auto", "last", "mean", "none"],
        Field(description="how embeddings are made; auto: as the model's files say, else of the last token; none: no embeddings"),
    ] = "auto"
    matryoshka: Annotated[bool, Field(description="embeddings may be cut to `dimensions`, though the model's config does not say so")] = (
        False
    )
    max_grammar_bytes: Annotated[
        NonNegative, Field(description="largest schema, regular expression or grammar of a request; 0: no structured output")
    ] = 64 * 1024
    grammar_timeout: Annotated[
        float, Field(gt=0, allow_inf_nan=False, description="seconds for compiling a grammar, and for one of its masks")
    ] = 5
    grammar_cache_entries: Annotated[Positive, Field(description="compiled grammars that are kept, least recently used go first")] = 64
    grammar_threads: Annotated[Positive, Field(description="threads of the engine that compile grammars and fill masks")] = 2
    tool_call_parser: Annotated[
        str, Field(description="format of the model's tool calls, by family; auto: from its chat template; none: calls stay text")
    ] = "auto"
    reasoning_parser: Annotated[
        str, Field(description="markers around the model's reasoning, by family; auto: from its chat template; none: it stays text")
    ] = "auto"
    trust_request_chat_template: Annotated[
        bool, Field(description="requests may bring a chat_template of their own: a program, so for those alone who are trusted")
    ] = False
    max_body_bytes: Annotated[Positive, Field(description="largest request body")] = 8 * 1024 * 1024
    max_logprob_entries: Annotated[
        NonNegative,
        Field(description="log-probabilities that an answer may hold: tokens of prompts and answers times those of each; 0: no bound"),
    ] = 4 * 1024 * 1024
    max_header_bytes: Annotated[int, Field(ge=1024, description="largest request line and headers, bytes; larger ones get 431")] = 64 * 1024
    max_headers: Annotated[int, Field(ge=8, description="most headers of a request; more get 431")] = 128
    header_timeout: Annotated[float, Field(gt=0, description="seconds for a request's headers to come; then 408")] = 10
    body_timeout: Annotated[float, Field(gt=0, description="seconds for a request's body to come; then 408")] = 60
    max_connections: Annotated[Positive, Field(description="most connections; further ones get 503, except probes")] = 10_000
    metrics_names: Annotated[Literal["fairlead", "vllm"], Field(description="vllm: metrics also under vLLM's names")] = "fairlead"
    token_cache_bytes: Annotated[
        NonNegative, Field(description="memory for token ids of earlier prompts that came without a router; 0: none are kept")
    ] = 64 * 1024 * 1024
    engine_timeout: Annotated[
        float,
        Field(gt=0, description="seconds of silence after which a ready engine counts as dead"),
    ] = 120
    warm_tokens: Annotated[
        NonNegative, Field(description="tokens of its peers' hottest prefixes that a worker computes before it is ready; 0: none")
    ] = 0
    peers: Annotated[
        str,
        Field(description="where the service's workers are, in the form of the router's --workers, for --warm-tokens; empty: not warmed"),
    ] = ""
    warm_seconds: Annotated[float, Field(gt=0, description="seconds that this may delay it, at most")] = 10
    load_timeout: Annotated[
        float,
        Field(gt=0, description="seconds without a byte, a layer or work on the way after which a load counts as stuck, and ends"),
    ] = 120

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Last of all: what LeaderWorkerSet tells its pods. An empty variable is none, an empty flag is the empty value."""
        return init_settings, EnvSettingsSource(settings_cls, env_ignore_empty=True), GroupEnvironment(settings_cls)

    @field_validator("model", "speculative_model")
    @classmethod
    def _model_uri(cls, value: str, info: ValidationInfo) -> str:
        if not value and info.field_name == "speculative_model":
            return value
        if re.fullmatch(r"hf://[\w.-]+(/[\w.-]+)?(@[\w./-]+)?|s3://[\w.-]+(/[\w.=+-]+)*/?|file:///.+", value):
            return value
        raise ValueError("is no model URI; give hf://org/name, hf://org/name@revision, s3://bucket/folder or file:///path")

    @field_validator("tool_call_parser", "reasoning_parser")
    @classmethod
    def _parser(cls, value: str, info: ValidationInfo) -> str:
        names = TOOL_CALL_PARSERS if info.field_name == "tool_call_parser" else REASONING_PARSERS
        if value not in names:
            raise ValueError(f"is none of {', '.join(names)}")
        return value

    @field_validator("lora")
    @classmethod
    def _adapters(cls, value: list[str]) -> list[str]:
        for one in value:
            name, _, uri = one.partition("=")
            if not re.fullmatch(ADAPTER_NAME, name) or not uri:
                raise ValueError(f"{one!r} is not NAME=URI, as in sql=hf://org/name or sql=file:///path")
        if len({one.partition("=")[0] for one in value}) < len(value):
            raise ValueError("two adapters have one name; requests choose by name")
        return value

    @field_validator("redis_url")
    @classmethod
    def _redis_url(cls, value: str) -> str:
        if value:
            parse_url(value)
        return value

    @field_validator("peers")
    @classmethod
    def _peers(cls, value: str) -> str:
        if value:
            create_source(value, "--peers")
        return value

    @field_validator("advertise")
    @classmethod
    def _address(cls, value: str) -> str:
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
        if self.deterministic and (self.tensor_parallel > 1 or self.lora or self.allow_runtime_lora_updating):
            raise ValueError(
                "--deterministic is for one device and without LoRA adapters: "
                "leave out --tensor-parallel, --lora and --allow-runtime-lora-updating, or --deterministic"
            )
        if self.itl_target_ms and self.chunked_prefill_size <= 0:
            raise ValueError("--itl-target-ms cuts prompts into chunks; give --chunked-prefill-size above 0 with it")
        if (self.speculative_method == "draft") != bool(self.speculative_model):
            raise ValueError(
                f"--speculative-method {self.speculative_method} with --speculative-model {self.speculative_model!r}: "
                "method draft needs a model to draft with, and no other method takes one"
            )
        if self.speculative_ngram_min > self.speculative_ngram_max:
            raise ValueError(
                f"--speculative-ngram-min {self.speculative_ngram_min} is more than --speculative-ngram-max {self.speculative_ngram_max}"
            )
        if len(self.lora) > self.max_loras:
            raise ValueError(f"--lora names {len(self.lora)}, and --max-loras is {self.max_loras}: raise --max-loras")
        if same := sorted(self.loras.keys() & set(self.names)):
            raise ValueError(f"--lora {same[0]}=…: {same[0]!r} is the model's own name; give the adapter another")
        select_parsers(self.tool_call_parser, self.reasoning_parser, ())
        if self.redis_url and not self.index_namespace:
            raise ValueError("--redis-url needs --index-namespace NS/NAME too")
        _ = self.redis
        return self

    def _check_nodes(self) -> None:
        if self.nodes == 1:
            if self.node_rank or self.leader:
                raise ValueError("--node-rank and --leader are of a model over several nodes: give --nodes too")
            return
        if self.tensor_parallel % self.nodes:
            raise ValueError(
                f"--tensor-parallel {self.tensor_parallel} is not a multiple of --nodes {self.nodes}: each node has as many ranks"
            )
        if self.node_rank >= self.nodes:
            raise ValueError(f"--node-rank {self.node_rank} is none of --nodes {self.nodes}: they are numbered from 0")
        if not re.fullmatch(r"(\[[0-9a-fA-F:]+\]|[^:\s/]+)(:\d{1,5})?", self.leader) or not 0 < self.leader_address[1] <= MAX_PORT:
            raise ValueError(f"--nodes {self.nodes} needs --leader HOST[:PORT], the same on all of them (got {self.leader!r})")
        if len(self.nodes_secret) < MIN_SECRET_LENGTH:
            raise ValueError(
                f"--nodes {self.nodes} needs a shared secret: set FAIRLEAD_NODES_SECRET to the same {MIN_SECRET_LENGTH} characters "
                "or more on all of them"
            )

    @property
    def local_ranks(self) -> int:
        """Ranks of this node."""
        return self.tensor_parallel // self.nodes

    @property
    def leader_address(self) -> tuple[str, int]:
        """Host (of IPv6 without brackets) and port."""
        host, _, port = self.leader.rpartition(":") if re.search(r":\d+$", self.leader) else (self.leader, "", "")
        return host.strip("[]"), int(port or NODES_PORT)

    @property
    def redis(self) -> RedisAccess | None:
        """Raises ValueError for what can never work."""
        if not self.redis_url:
            return None
        files = (self.redis_password_file, self.redis_ca_file, self.redis_cert_file, self.redis_key_file, self.redis_username_file)
        return RedisAccess(self.redis_url, self.redis_username, *files)

    @property
    def names(self) -> tuple[str, ...]:
        """Names that requests may give as `model`; the first is the one shown."""
        given = tuple(name.strip() for name in self.served_model_name.split(",") if name.strip())
        if given:
            return given
        scheme, _, rest = self.model.partition("://")
        return (rest.partition("@")[0] if scheme == "hf" else PurePosixPath(rest).name,)

    @property
    def loras(self) -> dict[str, str]:
        """Adapters to load at the start: name -> URI."""
        return {name: uri for name, _, uri in (one.partition("=") for one in self.lora)}

    @property
    def pod(self) -> str:
        return self.pod_name or socket.gethostname()

    def address(self, port: int) -> str:
        """Where the router finds this worker, `port` being the one really bound."""
        if self.advertise:
            return self.advertise
        host = socket.gethostname() if self.host in ("", "0.0.0.0", "::") else self.host
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def describe(self) -> str:
        """One `flag=value` for each flag, fit for a log: no passwords."""
        fields = self.model_dump() | {"redis_url": redact_url(self.redis_url)}
        fields["nodes_secret"] = "***" if self.nodes_secret else ""
        return " ".join(f"{_flag(name)}={value}" for name, value in fields.items())

    @classmethod
    def from_command_line(cls, arguments: list[str] | None = None) -> "WorkerConfig":
        """Read flags and environment; a bad value ends the process with status 2 and a line for each that names the flag."""
        try:
            return cls(_cli_parse_args=sys.argv[1:] if arguments is None else arguments)
        except ValidationError as error:
            _exit_with_errors(error)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _exit_with_errors(error: ValidationError) -> NoReturn:
    for problem in error.errors(include_url=False):
        message = problem["msg"].removeprefix("Value error, ")
        if not problem["loc"]:
            print(f"fairlead-worker: {message}", file=sys.stderr)
            continue
        flag = _flag(str(problem["loc"][0]).replace("-", "_"))
        if problem["type"] == "missing":
            print(f"fairlead-worker: {flag} is missing; give it, or set FAIRLEAD_{flag[2:].replace('-', '_').upper()}", file=sys.stderr)
        else:
            given = redact_url(problem["input"]) if flag == "--redis-url" else problem["input"]
            print(f"fairlead-worker: {flag} {given!r}: {message}", file=sys.stderr)
    raise SystemExit(2)
