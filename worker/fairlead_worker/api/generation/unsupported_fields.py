"""Fields whose values would change the answer in unsupported ways. The worker refuses them instead of ignoring them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from fairlead_worker.api.errors import invalid


@dataclass(frozen=True, slots=True)
class Refusal:
    """An unsupported field. `accepted`: values that change nothing; `null` and an absent field are always accepted. Others get a 400."""

    accepted: tuple[Any, ...]
    reason: str


_NOTHING: tuple[Any, ...] = ([], {})

REFUSALS: Mapping[str, Refusal] = {
    "audio": Refusal((), "the model outputs text only"),
    "early_stopping": Refusal((False,), "there is no beam search"),
    "ec_transfer_params": Refusal(_NOTHING, "no other process holds a part of the request"),
    "function_call": Refusal(("none", "auto"), "tool_choice has replaced it and says the same"),
    "functions": Refusal(([],), "tools have replaced them: give each as {type: function, function: {…}}"),
    "kv_transfer_params": Refusal(_NOTHING, "a prompt's KV is computed and cached where it is answered"),
    "length_penalty": Refusal((1,), "there is no beam search"),
    "logprob_token_ids": Refusal(([],), "log-probabilities are those of the most likely tokens: see logprobs and top_logprobs"),
    "logits_processors": Refusal(([],), "client code is not executed; see logit_bias, bad_words and structured_outputs"),
    "media_io_kwargs": Refusal(_NOTHING, "the model reads text only"),
    "mm_processor_kwargs": Refusal(_NOTHING, "the model reads text only"),
    "modalities": Refusal((["text"],), "the model outputs text only"),
    "moderation": Refusal((), "nothing is moderated"),
    "prediction": Refusal((), "no prediction is compared; speculation is the server's (--speculative-config)"),
    "prompt_embeds": Refusal(([],), "prompts are text or token ids"),
    "stop_regex": Refusal(("", []), "an answer stops at fixed texts: see stop"),
    "suffix": Refusal(("",), "fill-in-the-middle is not supported"),
    "use_beam_search": Refusal((False,), "there is no beam search; see best_of"),
    "vllm_xargs": Refusal(_NOTHING, "there are no extensions"),
    "web_search_options": Refusal((), "the model has no web access"),
}

HINTS: Mapping[str, str] = {
    "metadata": "belongs to stored answers; chats and completions are not stored",
    "prompt_cache_key": "prompts share cached prefixes without it; `cache_salt` separates them",
    "prompt_cache_options": "as `prompt_cache_key`",
    "prompt_cache_retention": "the cache keeps what is used",
    "safety_identifier": "nothing is reported",
    "service_tier": "there is one tier; `priority` and the X-SLO-Class header set the order",
    "store": "chats and completions are not stored",
    "verbosity": "a hint for OpenAI's own models; ask for it in the messages",
}
"""Fields that never change the answer: accepted and ignored."""


def check_unsupported(request: msgspec.Struct) -> None:
    """Raise ApiError 400 for the first unsupported value."""
    for field, refusal in REFUSALS.items():
        value = getattr(request, field, None)
        if value is None or any(
            value == accepted and isinstance(value, bool) == isinstance(accepted, bool) for accepted in refusal.accepted
        ):
            continue
        others = [f"give {to_json(accepted)}" for accepted in refusal.accepted[:1] if accepted not in _NOTHING]
        raise invalid(f"{field}: not supported, as {refusal.reason}; {' or '.join(['leave it out', *others])}", param=field)


def to_json(value: Any) -> str:
    """Return a value as JSON."""
    return msgspec.json.encode(value).decode()
