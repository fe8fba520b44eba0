"""`--metrics-names vllm`: vLLM's names of the same metrics. The labels stay Fairlead's (`model_name`, without vLLM's `engine`)."""

from typing import Final

SAME: Final = (
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "prompt_tokens_total",
    "generation_tokens_total",
    "num_preemptions_total",
    "request_success_total",
    "request_prompt_tokens",
    "request_generation_tokens",
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "spec_decode_num_drafts_total",
    "spec_decode_num_draft_tokens_total",
    "spec_decode_num_accepted_tokens_total",
    "spec_decode_num_accepted_tokens_per_pos_total",
)
OLDER: Final = {
    "kv_cache_usage_perc": "gpu_cache_usage_perc",
    "inter_token_latency_seconds": "time_per_output_token_seconds",
    "prefix_cache_queries_total": "gpu_prefix_cache_queries_total",
    "prefix_cache_hits_total": "gpu_prefix_cache_hits_total",
}
"""vLLM's names before version 0.11. Dashboards still use them."""

NAMES: Final = {f"fairlead_{name}": [f"vllm:{other}" for other in (name, OLDER.get(name)) if other] for name in SAME}
