"""The engine's Prometheus exposition: its load, and its families under Fairlead's names."""

import re
from collections.abc import Mapping
from math import isfinite
from typing import Final

import msgspec

from fairlead_agent.config import Runtime
from fairlead_common.metric_aliases import SHARED_WITH_VLLM, add_aliases

_SAMPLE: Final = re.compile(rb"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)", re.MULTILINE)
_LABEL: Final = re.compile(rb'(\w+)="((?:[^"\\]|\\.)*)"')
NAMES: Final[Mapping[Runtime, Mapping[str, str]]] = {
    "vllm": {f"vllm:{name}": f"fairlead_{name}" for name in SHARED_WITH_VLLM},
    "sglang": {
        "sglang:num_running_reqs": "fairlead_num_requests_running",
        "sglang:num_queue_reqs": "fairlead_num_requests_waiting",
        "sglang:token_usage": "fairlead_kv_cache_usage_perc",
        "sglang:cached_tokens_total": "fairlead_prefix_cache_hits_total",
        "sglang:prompt_tokens_total": "fairlead_prompt_tokens_total",
        "sglang:generation_tokens_total": "fairlead_generation_tokens_total",
        "sglang:time_to_first_token_seconds": "fairlead_time_to_first_token_seconds",
        "sglang:inter_token_latency_seconds": "fairlead_inter_token_latency_seconds",
        "sglang:e2e_request_latency_seconds": "fairlead_e2e_request_latency_seconds",
    },
}
"""Fairlead's name of each of the engine's families. The families have equal meanings."""


class EngineStats(msgspec.Struct, frozen=True):
    """One scrape of the engine. Counters are since its start."""

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    """Share of KV blocks that requests hold, 0 to 1."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    token_gap_seconds: float = 0.0
    """Sum of the times between tokens; `token_gaps` is their number."""
    token_gaps: int = 0
    block_size: int = 0
    """Tokens of a KV block; 0: the engine does not tell."""
    blocks: int = 0
    started: float = 0.0
    """Start of the engine's process, Unix time."""


def read_stats(text: bytes, runtime: Runtime) -> EngineStats:
    """Return the load in an exposition. Series of several engine cores are summed."""
    sums: dict[str, float] = {}
    info: dict[str, str] = {}
    for name, labels, value in _SAMPLE.findall(text):
        key = name.decode()
        try:
            number = float(value)
        except ValueError:
            continue
        if isfinite(number):
            sums[key] = sums.get(key, 0.0) + number
        if key == "vllm:cache_config_info":
            info = {label.decode(): text.decode() for label, text in _LABEL.findall(labels)}
    theirs = {ours: name for name, ours in NAMES[runtime].items()}

    def total(name: str, suffix: str = "") -> float:
        return sums.get(theirs.get(f"fairlead_{name}", "") + suffix, 0.0)

    usage = total("kv_cache_usage_perc") or sums.get("vllm:gpu_cache_usage_perc", 0.0)
    return EngineStats(
        running=round(total("num_requests_running")),
        waiting=round(total("num_requests_waiting")),
        kv_usage=usage,
        prompt_tokens=round(total("prompt_tokens_total")),
        cached_tokens=round(total("prefix_cache_hits_total")),
        output_tokens=round(total("generation_tokens_total")),
        token_gap_seconds=total("inter_token_latency_seconds", "_sum"),
        token_gaps=round(total("inter_token_latency_seconds", "_count")),
        block_size=_whole(info.get("block_size")),
        blocks=_whole(info.get("num_gpu_blocks")),
        started=sums.get("process_start_time_seconds", 0.0),
    )


def add_own_names(text: bytes, runtime: Runtime) -> bytes:
    """Return the exposition with each known family a second time, under Fairlead's name."""
    return add_aliases(text, {name: [ours] for name, ours in NAMES[runtime].items()})


def _whole(text: str | None) -> int:
    return int(text) if text is not None and text.isdigit() else 0
