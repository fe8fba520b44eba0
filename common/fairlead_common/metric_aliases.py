"""Aliases of metrics, so that dashboards of other systems work. They are added to the exposition's text, without a library."""

from collections.abc import Mapping, Sequence
from typing import Final

SHARED_WITH_VLLM: Final = (
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
"""Metrics with the same meaning in vLLM and here, without their prefixes `vllm:` and `fairlead_`."""
_HELP = b"# HELP "


def add_aliases(text: bytes, names: Mapping[str, Sequence[str]]) -> bytes:
    """Return a Prometheus exposition, followed by a copy of each family in `names` under each alias, with the same labels and values.

    Names are those in the text: a counter's ends in `_total`.
    """
    copies: list[bytes] = []
    for family in (b"\n" + text.rstrip(b"\n")).split(b"\n" + _HELP)[1:]:  # only at the start of a line: labels may contain clients' text
        name = family.split(b" ", 1)[0]
        for other in names.get(name.decode(), ()):
            copies.append(_HELP + b"\n".join(_rename(line, name, other.encode()) for line in family.split(b"\n")) + b"\n")
    return text + b"".join(copies)


def _rename(line: bytes, name: bytes, other: bytes) -> bytes:
    for lead in (b"", b"# TYPE "):
        if line.startswith(lead + name):
            return lead + other + line[len(lead) + len(name) :]
    return line
