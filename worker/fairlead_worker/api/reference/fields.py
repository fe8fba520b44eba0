"""Notes on each request field, for `GET /openapi.json` and for the pages that docs/generate/api.py writes."""

import msgspec

from fairlead_common.protocols.paths import CLASSIFICATIONS, EMBEDDINGS, POOLING, RERANKS, SCORES
from fairlead_worker.api.pooling.schema import ClassifyRequest, EmbeddingRequest, RerankRequest, ScoreRequest
from fairlead_worker.api.schema import ChatRequest, CommonRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

ENDPOINTS: dict[str, type[CommonRequest]] = {"/v1/completions": CompletionRequest, "/v1/chat/completions": ChatRequest}
REFUSED = {
    "stream_options": "`include_obfuscation: true` is refused",
}
"""Fields with some unsupported values that get a 400. Fields that are wholly unsupported are in `unsupported_fields.py`."""
NOTES = {
    "add_special_tokens": "adds the tokenizer's special tokens to the prompt",
    "allowed_token_ids": "not empty",
    "cache_salt": "prompts with different salts share no cached KV, as in vLLM",
    "bad_words": "1 to 128 characters each, not only spaces; one can appear if no other token is possible",
    "best_of": "at least `n`; more than `n` only without `stream`",
    "chat_template": "replaces the model's template; needs `--trust-request-chat-template`, else 400",
    "chat_template_kwargs": "variables for the chat template; `chat_template` is not one of them",
    "documents": "for chat templates that read documents",
    "guided_choice": "1 to 1024 strings; same as `structured_outputs.choice`",
    "guided_grammar": "same as `structured_outputs.grammar`",
    "guided_json": "a JSON schema, or one as a string; same as `structured_outputs.json`",
    "guided_regex": "same as `structured_outputs.regex`",
    "guided_whitespace_pattern": "same as `structured_outputs.whitespace_pattern`",
    "ebnf": "SGLang's name of `guided_grammar`",
    "include_stop_str_in_output": "also includes the text of a stop token, if it has one",
    "json_schema": "SGLang's name of `guided_json`",
    "logit_bias": "token ids as keys, values from -100 to 100, at most 1024 entries",
    "max_completion_tokens": "default: `max_tokens`; without both, up to the end of the context",
    "min_tokens": "at most `max_tokens`",
    "model": "a served name or the name of a LoRA adapter; default: the first served name",
    "priority": "lower values run first",
    "prompt": "at most 1024 sequences, counted times `n` or `best_of`",
    "prompt_logprobs": "only without `stream`",
    "regex": "SGLang's name of `guided_regex`",
    "request_id": "1 to 128 visible ASCII characters; the `id` of the answer, after its prefix; default: the X-Request-Id header",
    "response_format": "`text`, `json_object`, `json_schema` or `structural_tag`",
    "return_token_ids": "adds `token_ids` to choices and chunks, and `prompt_token_ids`",
    "return_tokens_as_token_ids": "log-probabilities name tokens as `token_id:7`; `prompt_logprobs` has ids and texts in any case",
    "seed": "default: random",
    "skip_special_tokens": "default: true",
    "spaces_between_special_tokens": "false, with `skip_special_tokens` false, is refused for the few tokenizers that add these spaces",
    "stop": "at most 16, none empty; the text ends before the first match",
    "stream_options": "only with `stream`: `include_usage`, `continuous_usage_stats`",
    "structured_outputs": "one of `json`, `json_object`, `regex`, `choice`, `grammar`, `structural_tag`; also `whitespace_pattern` or "
    "`disable_any_whitespace`",
    "include_reasoning": "false: reasoning is generated and counted but not returned, as in vLLM",
    "parallel_tool_calls": "false: the answer ends after its first call",
    "reasoning_effort": "a variable of the chat template; `none` also sets `enable_thinking` and `thinking` to false",
    "tool_choice": "`none`, `auto`, `required`, a function, a custom tool, or `allowed_tools`",
    "tools": "functions and custom tools, at most 512; the model reads the grammar of a custom tool, but need not follow it",
    "thinking_token_budget": "most reasoning tokens, those at the end of the prompt included; then the end marker is forced. 0: no "
    "reasoning; -1: no bound. 400 for a model without reasoning, and for gpt-oss",
    "truncate_prompt_tokens": "keeps this many tokens of the prompt; -1: as many as leave room for `max_tokens`; 0 is refused",
    "truncation_side": "`left` (default) keeps the last tokens of a truncated prompt, `right` the first",
    "user": "at most 256 characters; one user cannot hold the whole batch while others wait",
    "top_logprobs": "only with `logprobs`",
}
OWN_NOTES: dict[str, dict[str, str]] = {
    "/v1/completions": {
        "add_special_tokens": "default: true",
        "echo": "returns the prompt before the answer",
        "max_tokens": "default: 16; 0 is for `echo` and `prompt_logprobs`",
    },
    "/v1/chat/completions": {
        "add_special_tokens": "default: false, because chat templates write them",
        "echo": "returns the last message before the answer, if the answer continues it or has the same role",
        "max_tokens": "used where `max_completion_tokens` is absent",
    },
}
VALUES = {
    "prompt": "a text, token ids, or an array of either",
    "messages": "array of OpenAI messages; roles `system`, `developer` (a system message if the template has no such role), `user`, "
    "`assistant`, `tool`; others are refused",
}
"""Texts for fields whose schema types would not read well."""
POOLED_BY_PATH: dict[tuple[str, ...], type[msgspec.Struct]] = {
    (EMBEDDINGS, POOLING): EmbeddingRequest,
    SCORES: ScoreRequest,
    RERANKS: RerankRequest,
    CLASSIFICATIONS: ClassifyRequest,
}
"""Requests that are answered from hidden states, by all their paths. Each of their fields has a note of its own."""
_FIRST, _SECOND = "a text, or as many texts as the other side has", "a text, or an array of texts"
POOLED_NOTES = NOTES | {
    "add_generation_prompt": "default: false; only with `messages`",
    "add_special_tokens": "default: false; only with `messages`",
    "cache_salt": "string; same as in completions",
    "continue_final_message": "default: false; true leaves the last message open",
    "data_1": "same as `text_1`",
    "data_2": "same as `text_2`",
    "dimensions": "returns the first values, normalised again; only for models trained for it (`is_matryoshka` or "
    "`matryoshka_dimensions` in the model's config, or `--matryoshka`), else 400",
    "documents": "texts; rerank: or objects with a `text`, at most 2047; score: same as `text_2`",
    "embed_dtype": "`float32`",
    "encoding_format": "`float` (default) or `base64` (little-endian float32)",
    "endianness": "`little` or `native`",
    "input": "a text, token ids, or an array of either, at most 2048; none empty or longer than the context",
    "items": "same as `text_2`",
    "messages": "same as in chat completions; give either `messages` or `input`",
    "normalize": "true: embeddings have unit length; false is refused",
    "queries": "same as `text_1`",
    "query": "a text",
    "return_documents": "default: true",
    "text_1": f"{_FIRST}; `queries` and `data_1` are other names of it",
    "text_2": f"{_SECOND}; `documents`, `items` and `data_2` are other names of it",
    "top_n": "default, or 0: all",
    "truncate_prompt_tokens": "keeps this many tokens of each text; -1: as many as the context holds; 0 is refused",
    "truncation_side": "`left` keeps the last tokens of a truncated text, `right` the first; default: `left`, and `right` for encoders",
    "use_activation": "default: true; false returns logits of a model with a head; refused for embeddings, which have unit length",
}
TOKEN_BY_PATH: dict[tuple[str, ...], type[msgspec.Struct]] = {("/tokenize",): TokenizeRequest, ("/detokenize",): DetokenizeRequest}
TOKEN_NOTES = NOTES | {
    "add_generation_prompt": "default: true; only with `messages`",
    "add_special_tokens": "default: true for a prompt; false for messages, because chat templates write them",
    "continue_final_message": "default: false; true leaves the last message open",
    "messages": "same as in chat completions; give either `messages` or `prompt`",
    "prompt": "a text, which may be longer than the context",
    "return_token_strs": "default: false; true returns each token as the vocabulary writes it",
    "tokens": "required; token ids; ids outside the vocabulary are left out of the text",
    "tools": "same as in chat completions",
}
LORA_NOTES = {
    "lora_name": "required; letters, digits and `._:/-`; load: 400 for the model's own name or a loaded adapter; unload: 404 if unknown",
    "lora_path": "load: required; URI or folder; 400 with the reason if it cannot be fetched, read or served",
    "load_inplace": "load: true replaces the adapter of this name; running requests finish with the old one",
}
