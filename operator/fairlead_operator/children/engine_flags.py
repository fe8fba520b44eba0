"""Command lines of vLLM and SGLang: the fields of `spec.engine` as their flags. Pure.

A field with its default passes no flag, so that the engine's own default counts. `spec.engine.args` come last: the last value of a flag
wins.
"""

import json
from collections.abc import Mapping
from urllib.parse import urlsplit

from fairlead_common.scheduling_policy import DEFINITIONS
from fairlead_operator.api import InferenceService
from fairlead_operator.api.engine import Engine, KvCache
from fairlead_operator.api.engine_runtime import Runtime
from fairlead_operator.api.fields import quantity
from fairlead_operator.children.model_source import ModelSource
from fairlead_operator.children.pods import command_line

ENGINE_PORT, EVENTS_PORT, REPLAY_PORT = 8100, 5557, 5558
"""On the loopback of the pod: no other pod reaches them."""
EVENTS, REPLAY = f"tcp://127.0.0.1:{EVENTS_PORT}", f"tcp://127.0.0.1:{REPLAY_PORT}"
COMMANDS: Mapping[Runtime, tuple[str, ...]] = {"VLLM": ("vllm", "serve"), "SGLang": ("python3", "-m", "sglang.launch_server")}
MAX_LORAS, MAX_LORA_RANK = 8, 64  # the defaults of Fairlead's worker; those of vLLM are 1 and 16
_EVENTS = {"publisher": "zmq", "endpoint": EVENTS, "replay_endpoint": REPLAY}
_DEFAULT = Engine()


def arguments(service: InferenceService, source: ModelSource) -> list[str]:
    """Return the arguments of the engine's container."""
    build = _vllm if service.spec.engine.runtime == "VLLM" else _sglang
    return [*build(service, source), *service.spec.engine.args]


def _vllm(service: InferenceService, source: ModelSource) -> list[str]:
    engine, cache = service.spec.engine, service.spec.engine.kv_cache
    flags = {
        **_common(service, source),
        "kv-events-config": _json({"enable_kv_cache_events": True, **_EVENTS}),
        # The agent passes priorities on. Requests of equal priority run by arrival, and under fcfs vLLM ignores priorities.
        "scheduling-policy": "priority",
        **_changed(
            engine, {"max_model_len": "max-model-len", "max_num_seqs": "max-num-seqs", "max_prefill_tokens": "max-num-batched-tokens"}
        ),
        **_changed(cache, {"page_tokens": "block-size", "pages": "num-gpu-blocks-override"}),
        "kv-cache-memory-bytes": None if cache.size is None else round(quantity(cache.size)),
    }
    # The agent reads /metrics twice a second, and vLLM would log each; routers log the requests.
    switches = ["--enable-prompt-tokens-details", "--disable-uvicorn-access-log"]
    return [_locate(source.uri)[0], *command_line(flags), *switches, *_adapters(source)]


def _sglang(service: InferenceService, source: ModelSource) -> list[str]:
    engine, cache = service.spec.engine, service.spec.engine.kv_cache
    flags = {
        "model-path": _locate(source.uri)[0],
        **_common(service, source),
        "kv-events-config": _json(_EVENTS),
        # SGLang's default is a page of one token, and each page is an entry of the index.
        "page-size": cache.page_tokens,
        **_changed(
            engine,
            {
                "max_model_len": "context-length",
                "max_num_seqs": "max-running-requests",
                "max_prefill_tokens": "max-prefill-tokens",
                "chunked_prefill_size": "chunked-prefill-size",
            },
        ),
        "schedule-policy": None if engine.scheduling_policy is None else DEFINITIONS[engine.scheduling_policy].sglang,
        "max-total-tokens": None if cache.pages is None else cache.pages * cache.page_tokens,
    }
    return [*command_line(flags), "--enable-metrics", "--enable-cache-report"]


def _common(service: InferenceService, source: ModelSource) -> dict[str, object]:
    """Return the flags that have the same name in both engines."""
    engine = service.spec.engine
    return {
        "served-model-name": service.served_model_name,
        "host": "127.0.0.1",
        "port": ENGINE_PORT,
        "revision": _locate(source.uri)[1],
        "tensor-parallel-size": engine.tensor_parallel if engine.tensor_parallel > 1 else None,
        "dtype": engine.dtype.lower() if engine.dtype != "Auto" else None,
        "kv-cache-dtype": "fp8_e4m3" if engine.kv_cache.dtype == "FP8" else None,
        "quantization": engine.quantization.lower() if engine.quantization != "None" else None,
    }


def _adapters(source: ModelSource) -> list[str]:
    """Return vLLM's flags of the adapters: one flag with all of them, because the last `--lora-modules` counts."""
    if not source.adapters:
        return []
    modules = [f"{name}={_locate(uri)[0]}" for name, uri in source.adapters.items()]
    held = len(modules)
    return [
        "--enable-lora",
        f"--max-loras={min(held, MAX_LORAS)}",
        f"--max-cpu-loras={held}",
        f"--max-lora-rank={MAX_LORA_RANK}",
        "--lora-modules",
        *modules,
    ]


def _locate(uri: str) -> tuple[str, str]:
    """Return the model as an engine names it, and its revision: `hf://a/b@c` → (`a/b`, `c`), `file:///m` → (`/m`, empty)."""
    if uri.startswith("file://"):
        return urlsplit(uri).path, ""
    name, _, revision = uri.removeprefix("hf://").partition("@")
    return name, revision


def _changed(part: Engine | KvCache, names: Mapping[str, str]) -> dict[str, object]:
    """Return the flags of the fields that differ from their defaults."""
    default = _DEFAULT if isinstance(part, Engine) else _DEFAULT.kv_cache
    return {flag: getattr(part, name) for name, flag in names.items() if getattr(part, name) != getattr(default, name)}


def _json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))
