"""vLLM's own fields, streamed and whole, work as vLLM documents them."""

from array import array
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.worker.api.process import WorkerProcess

from fairlead_common.prompts.encoder import PromptEncoder
from fairlead_worker.api.errors import ApiError
from fairlead_worker.api.generation.bad_words import find_token_sequences
from fairlead_worker.api.generation.sampling import truncate_prompt
from fairlead_worker.api.tokenize import check_chat_template

USER = [{"role": "user", "content": "one two"}]
GREEDY: dict[str, Any] = {"prompt": "one two three", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
CHAT: dict[str, Any] = {"messages": USER, "max_tokens": 6, "temperature": 0, "ignore_eos": True}


def chat(worker: WorkerProcess, **fields: Any) -> dict[str, Any]:
    response = worker.post("/v1/chat/completions", **{**CHAT, **fields})
    assert response.status_code == 200, response.text
    return cast(dict[str, Any], response.json())


def tokens_of(worker: WorkerProcess, **body: Any) -> list[int]:
    return cast(list[int], worker.post("/tokenize", **body).json()["tokens"])


def refused(worker: WorkerProcess, path: str, **body: Any) -> tuple[int, str]:
    response = worker.post(path, **body)
    return response.status_code, response.json()["error"]["param"]


def test_token_ids_are_shown_whole_and_streamed(shared: WorkerProcess) -> None:
    prompt = tokens_of(shared, prompt=GREEDY["prompt"])
    (choice,) = shared.complete(**GREEDY, return_token_ids=True)["choices"]
    assert choice["prompt_token_ids"] == prompt
    assert len(choice["token_ids"]) == 8
    assert shared.post("/detokenize", tokens=choice["token_ids"]).json()["prompt"] == choice["text"]
    with shared.stream("/v1/completions", **GREEDY, return_token_ids=True) as (_, events):
        chunks = [event["choices"][0] for event in events if isinstance(event, dict)]
    assert chunks[0]["prompt_token_ids"] == prompt
    assert not any("prompt_token_ids" in chunk for chunk in chunks[1:])
    assert [token for chunk in chunks for token in chunk.get("token_ids", ())] == choice["token_ids"]

    answer = chat(shared, return_token_ids=True)
    assert answer["prompt_token_ids"] == tokens_of(shared, messages=USER)
    with shared.stream("/v1/chat/completions", **CHAT, return_token_ids=True) as (_, events):
        streamed = [event for event in events if isinstance(event, dict)]
    assert streamed[0]["prompt_token_ids"] == answer["prompt_token_ids"]
    shown = [token for event in streamed for token in event["choices"][0].get("token_ids", ())]
    assert shown == answer["choices"][0]["token_ids"]
    assert all("token_ids" in event["choices"][0] for event in streamed), "leading and last chunks have an empty list"
    plain = chat(shared)
    assert plain["choices"][0]["token_ids"] is plain["prompt_token_ids"] is plain["prompt_logprobs"] is None
    assert plain["choices"][0]["message"]["reasoning"] is plain["choices"][0]["message"]["reasoning_content"] is None


def test_usage_in_every_chunk_starts_at_zero_and_needs_include_usage(shared: WorkerProcess) -> None:
    def counts(**options: bool) -> list[int]:
        with shared.stream("/v1/chat/completions", **CHAT, stream_options=options) as (_, events):
            chunks = [event for event in events if isinstance(event, dict)]
        return [chunk["usage"]["completion_tokens"] for chunk in chunks if chunk.get("usage")]

    both = counts(include_usage=True, continuous_usage_stats=True)
    assert both[0] == 0 and both == sorted(both) and both[-1] == CHAT["max_tokens"]
    assert counts(include_usage=False, continuous_usage_stats=True) == counts(continuous_usage_stats=True) == []


def test_answers_name_the_system(shared: WorkerProcess) -> None:
    name = chat(shared)["system_fingerprint"]
    assert name.startswith("fp_") and shared.complete(**GREEDY)["system_fingerprint"] == name
    with shared.stream("/v1/chat/completions", **CHAT) as (_, events):
        assert {event["system_fingerprint"] for event in events if isinstance(event, dict)} == {name}


def test_bad_words_do_not_come(shared: WorkerProcess) -> None:
    words: list[str] = []
    for _ in range(3):
        (choice,) = shared.complete(**GREEDY, bad_words=words, logprobs=0)["choices"]
        assert not any(token.strip() == word for token in choice["logprobs"]["tokens"] for word in words)
        words += [token.strip() for token in choice["logprobs"]["tokens"] if token.strip() and "\ufffd" not in token][:1]
    assert len(set(words)) == 3, "another word came each time, and was forbidden too"
    assert refused(shared, "/v1/completions", **GREEDY, bad_words=["  "]) == (400, "bad_words")
    assert refused(shared, "/v1/completions", **GREEDY, bad_words=["a"] * 129) == (400, "bad_words")


def test_bad_words_are_forbidden_with_and_without_a_space_before_them() -> None:
    class Encoder:
        def encode_text(self, text: str, add_special_tokens: bool) -> list[int]:
            return {"one": [1], " one": [2], "two": [3, 4], " two": [5], "far": [99], " far": [98]}[text]

    encoder = cast(PromptEncoder, Encoder())
    assert find_token_sequences(encoder, ["one", " two", "far", "one"], 50) == ((1,), (2,), (3, 4))


def test_the_stop_is_part_of_the_text_where_it_is_asked_for(shared: WorkerProcess) -> None:
    text = shared.complete(**GREEDY)["choices"][0]["text"]
    stop = text[3:5]
    body = GREEDY | {"stop": stop}
    assert shared.complete(**body)["choices"][0]["text"] == text[: text.index(stop)]
    shown = shared.complete(**body, include_stop_str_in_output=True)["choices"][0]
    assert shown["text"] == text[: text.index(stop) + 2]
    assert shown["stop_reason"] == stop
    with shared.stream("/v1/completions", **body, include_stop_str_in_output=True) as (_, events):
        assert "".join(event["choices"][0]["text"] for event in events if isinstance(event, dict)) == shown["text"]
    last = shared.complete(**GREEDY, return_token_ids=True)["choices"][0]["token_ids"][0]
    stopped = shared.complete(**GREEDY, stop_token_ids=[last], include_stop_str_in_output=True)["choices"][0]
    assert stopped["text"] == shared.post("/detokenize", tokens=[last]).json()["prompt"]


def test_special_tokens_are_shown_where_they_are_not_skipped(shared: WorkerProcess) -> None:
    special = shared.complete(**GREEDY | {"ignore_eos": False}, allowed_token_ids=[1], return_token_ids=True)
    assert special["choices"][0]["text"] == ""
    name = shared.post("/detokenize", tokens=[1]).json()["prompt"]
    body = GREEDY | {"max_tokens": 3, "allowed_token_ids": [1], "skip_special_tokens": False}
    for spaces in (None, True, False):
        assert shared.complete(**body, spaces_between_special_tokens=spaces)["choices"][0]["text"] == name * 3


def test_a_prompt_is_truncated(shared: WorkerProcess) -> None:
    prompt = tokens_of(shared, prompt="one two three four five six")
    for most, kept in ((3, prompt[-3:]), (len(prompt), prompt), (4096, prompt), (-1, prompt)):
        body = {"prompt": prompt, "max_tokens": 1, "truncate_prompt_tokens": most, "return_token_ids": True}
        assert shared.complete(**body)["choices"][0]["prompt_token_ids"] == kept
    long = {"prompt": [5] * 5000, "max_tokens": 10, "truncate_prompt_tokens": -1}
    assert shared.complete(**long)["usage"]["prompt_tokens"] == 4086
    for most in (0, 4097):
        assert refused(shared, "/v1/completions", prompt="x", truncate_prompt_tokens=most) == (400, "truncate_prompt_tokens")
    assert len(truncate_prompt(_tokens(9), -1, None, 5)) == 4, "room for one token of an answer"
    assert list(truncate_prompt(_tokens(9), 2, 1, 9, from_end=True)) == [0, 1]
    body = {"prompt": prompt, "max_tokens": 1, "truncate_prompt_tokens": 3, "truncation_side": "right", "return_token_ids": True}
    assert shared.complete(**body)["choices"][0]["prompt_token_ids"] == prompt[:3]


def _tokens(count: int) -> Any:
    return array("I", range(count))


def test_a_request_names_itself(shared: WorkerProcess) -> None:
    assert shared.complete(**GREEDY, request_id="mine-1")["id"] == "cmpl-mine-1"
    assert chat(shared, request_id="mine-2")["id"] == "chatcmpl-mine-2"
    assert refused(shared, "/v1/completions", **GREEDY, request_id="two words\n") == (400, "request_id")


def test_templates_and_documents_of_a_request(shared: WorkerProcess) -> None:
    template = "{% for d in documents or [] %}<{{ d.text }}>{% endfor %}{{ messages[-1].content }}{{ tail }}"
    more = {"chat_template": template, "documents": [{"text": "doc"}], "chat_template_kwargs": {"tail": "!"}}
    answer = chat(shared, **more, return_token_ids=True)
    assert answer["prompt_token_ids"] == tokens_of(shared, prompt="<doc>one two!", add_special_tokens=False)
    assert refused(shared, "/v1/chat/completions", **CHAT, chat_template="{% if %}") == (400, "chat_template")
    nested = {"chat_template_kwargs": {"chat_template": "x"}}
    assert refused(shared, "/v1/chat/completions", **CHAT, **nested) == (400, "chat_template_kwargs")


def test_a_template_needs_the_operators_trust() -> None:
    worker: Any = SimpleNamespace(config=SimpleNamespace(trust_request_chat_template=False))
    check_chat_template(worker, None, {"a": 1})
    with pytest.raises(ApiError, match="--trust-request-chat-template") as error:
        check_chat_template(worker, "x", None)
    assert error.value.param == "chat_template"


def test_a_chat_echoes_what_it_continues(shared: WorkerProcess) -> None:
    messages = [*USER, {"role": "assistant", "content": "three"}]
    fields = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    plain = chat(shared, **fields)["choices"][0]["message"]["content"]
    assert chat(shared, **fields, echo=True)["choices"][0]["message"]["content"] == "three" + plain
    with shared.stream("/v1/chat/completions", **{**CHAT, **fields}, echo=True) as (_, events):
        deltas = [event["choices"][0]["delta"] for event in events if isinstance(event, dict)]
    assert deltas[0] == {"role": "assistant", "content": "three"}
    assert "".join(delta.get("content", "") for delta in deltas) == "three" + plain
    assert chat(shared, echo=True)["choices"] == chat(shared)["choices"], "another role speaks: there is nothing to echo"


def test_log_probabilities_name_tokens_by_id_where_it_is_asked_for(shared: WorkerProcess) -> None:
    body = GREEDY | {"logprobs": 2, "return_token_ids": True, "return_tokens_as_token_ids": True}
    (choice,) = shared.complete(**body)["choices"]
    names = [f"token_id:{token}" for token in choice["token_ids"]]
    assert choice["logprobs"]["tokens"] == names
    assert all(name in top and len(top) == 2 for name, top in zip(names, choice["logprobs"]["top_logprobs"], strict=True))
    fields = {"logprobs": True, "top_logprobs": 1, "return_tokens_as_token_ids": True, "return_token_ids": True}
    (choice,) = chat(shared, **fields)["choices"]
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == [f"token_id:{token}" for token in choice["token_ids"]]


@pytest.mark.parametrize(
    ("field", "value"),
    [("thinking_token_budget", 5), ("prompt_embeds", "AAAA"), ("kv_transfer_params", {"do_remote_prefill": True}), ("suffix", "end")],
)
def test_what_is_not_done_is_refused_by_name(shared: WorkerProcess, field: str, value: Any) -> None:
    assert refused(shared, "/v1/completions", **GREEDY, **{field: value}) == (400, field)


def test_a_model_without_reasoning_ignores_the_budget_of_a_message_and_refuses_others(shared: WorkerProcess) -> None:
    fields = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4}
    answer = shared.post("/v1/chat/completions", **fields, thinking_token_budget=0)
    assert answer.status_code == 400 and "no reasoning that the worker knows (--reasoning-parser)" in answer.json()["error"]["message"]
    assert shared.post("/v1/chat/completions", **fields, thinking_token_budget=-1).status_code == 200
    assert shared.post("/v1/messages", **fields, thinking={"type": "enabled", "budget_tokens": 2}).status_code == 200


def test_the_document_is_served(shared: WorkerProcess) -> None:
    said = shared.client.get("/openapi.json").json()
    assert {"/v1/completions", "/v1/chat/completions", "/tokenize", "/v1/models/{name}"} <= said["paths"].keys()
