"""`--metrics-names vllm`: vLLM's names of the same metrics. The labels stay Fairlead's (`model_name`, without vLLM's `engine`)."""

from typing import Final

from fairlead_common.metric_aliases import SHARED_WITH_VLLM

OLDER: Final = {
    "kv_cache_usage_perc": "gpu_cache_usage_perc",
    "inter_token_latency_seconds": "time_per_output_token_seconds",
    "prefix_cache_queries_total": "gpu_prefix_cache_queries_total",
    "prefix_cache_hits_total": "gpu_prefix_cache_hits_total",
}
"""vLLM's names before version 0.11. Dashboards still use them."""

NAMES: Final = {f"fairlead_{name}": [f"vllm:{other}" for other in (name, OLDER.get(name)) if other] for name in SHARED_WITH_VLLM}
