"""Responses of both OpenAI endpoints, streamed and whole, from a real engine."""

from array import array
from typing import Any

import msgspec
import openai
import pytest
from tests.worker.api.process import WorkerProcess

from fairlead_common.prompts.encoder import PromptEncoder, PromptFormat

PROMPT = "The quick brown fox jumps over the lazy dog and runs away from the cat. " * 4
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Tell me of the sea."}]
GREEDY = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}


@pytest.fixture(scope="module")
def sdk(shared: WorkerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{shared.url}/v1", api_key="none", max_retries=0, _strict_response_validation=True)


def _streamed(worker: WorkerProcess, path: str, **body: Any) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
    """Return the choices of a stream (text, logprobs, reasons) and its usage."""
    choices: dict[int, dict[str, Any]] = {}
    usage, done = None, False
    with worker.stream(path, **body, stream_options={"include_usage": True}) as (response, events):
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        for event in events:
            assert not done
            if event == "[DONE]":
                done = True
                continue
            assert isinstance(event, dict)
            usage = event["usage"]
            for part in event["choices"]:
                choice = choices.setdefault(part["index"], {"text": "", "logprobs": None, "finish_reason": None})
                assert choice["finish_reason"] is None, "a choice went on after its finish"
                choice["text"] += part["delta"].get("content", "") if "delta" in part else part["text"]
                for name, values in (part["logprobs"] or {}).items():
                    choice["logprobs"] = choice["logprobs"] or {}
                    choice["logprobs"][name] = (choice["logprobs"].get(name) or []) + values if values is not None else None
                choice["finish_reason"] = part["finish_reason"]
                choice["stop_reason"] = part.get("stop_reason")
    assert done
    return [choices[index] for index in sorted(choices)], usage


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.9, "seed": 11, "top_p": 0.9, "top_k": 40, "min_p": 0.01},
        {"logprobs": 3, "seed": 5},
        {"n": 3, "seed": 9},
        {"stop": ["e", "the"], "seed": 3, "max_tokens": 200},
        {"stop_token_ids": list(range(200, 400)), "seed": 3, "max_tokens": 200},
        {"prompt": [PROMPT, "Other"], "n": 2, "seed": 4},
        {"echo": True, "seed": 4},
        {"echo": True, "logprobs": 2, "seed": 4},
        {"echo": True, "logprobs": 0, "n": 3, "prompt": [PROMPT, "Other"], "seed": 4},
        {"echo": True, "logprobs": 1, "max_tokens": 0, "n": 2},
    ],
    ids=lambda options: "-".join(options) or "greedy",
)
def test_a_stream_says_what_the_whole_answer_says(shared: WorkerProcess, options: dict[str, Any]) -> None:
    body = {"prompt": PROMPT, **GREEDY, "temperature": 1.0 if "seed" in options else 0, **options}
    whole = shared.complete(**body)
    streamed, usage = _streamed(shared, "/v1/completions", **body)
    expected = [{name: choice[name] for name in ("text", "logprobs", "finish_reason", "stop_reason")} for choice in whole["choices"]]
    assert streamed == expected
    assert usage is not None
    assert usage["completion_tokens"] == whole["usage"]["completion_tokens"]
    assert usage["prompt_tokens"] == whole["usage"]["prompt_tokens"]


@pytest.mark.parametrize("options", [{}, {"logprobs": True, "top_logprobs": 2}, {"stop": "a", "n": 2}])
def test_a_chat_streams_what_it_answers_whole(shared: WorkerProcess, options: dict[str, Any]) -> None:
    body = {"messages": MESSAGES, "max_completion_tokens": 30, "seed": 8, "ignore_eos": True, **options}
    response = shared.post("/v1/chat/completions", **body)
    assert response.status_code == 200, response.text
    streamed, _ = _streamed(shared, "/v1/chat/completions", **body)
    for choice, part in zip(response.json()["choices"], streamed, strict=True):
        assert part["text"] == choice["message"]["content"]
        assert part["finish_reason"] == choice["finish_reason"]
        assert (part["logprobs"] or {}).get("content") == (choice["logprobs"] or {}).get("content")


def test_the_role_comes_first_and_usage_last(shared: WorkerProcess) -> None:
    body = {"messages": MESSAGES, "max_tokens": 3, "stream_options": {"include_usage": True}, "ignore_eos": True}
    with shared.stream("/v1/chat/completions", **body) as (response, events):
        all_events = list(events)
        assert response.headers["x-fairlead-pod"] == "pod-0"
        assert int(response.headers["x-fairlead-cached-tokens"]) >= 0
    first, *_, finish, usage, done = all_events
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert finish["choices"][0]["finish_reason"] == "length"
    assert finish["choices"][0]["delta"] == {}
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 3
    assert "prompt_tokens_details" in usage["usage"]
    assert done == "[DONE]"


def test_equal_seeds_give_equal_tokens_and_others_do_not(shared: WorkerProcess) -> None:
    def text(**options: Any) -> str:
        return shared.complete(prompt=PROMPT, max_tokens=24, **options)["choices"][0]["text"]

    assert text(seed=1) == text(seed=1)
    assert text(seed=1) != text(seed=2)
    assert text() != text()
    many = shared.complete(prompt=PROMPT, max_tokens=24, seed=1, n=3)["choices"]
    assert many[0]["text"] == text(seed=1)
    assert len({choice["text"] for choice in many}) == 3


def test_penalties_and_bias_change_the_choice(shared: WorkerProcess) -> None:
    def tokens(**options: Any) -> list[str]:
        choice = shared.complete(**{"prompt": PROMPT, **GREEDY, "logprobs": 0, **options})["choices"][0]
        return choice["logprobs"]["tokens"]

    first, plain = shared.post("/tokenize", prompt="ab").json()["tokens"][0], tokens()
    assert len(set(tokens(logit_bias={str(first): 100}))) == 1
    assert len(set(tokens(logit_bias={str(first): 100}, frequency_penalty=2, max_tokens=120))) > 1, "100 is used up after 50 times"
    assert set(tokens(allowed_token_ids=[first])) == set(tokens(logit_bias={str(first): 100}))
    assert tokens(repetition_penalty=50.0) != plain
    assert tokens(presence_penalty=0, frequency_penalty=0, repetition_penalty=1, logit_bias={}) == plain
    chat = {"messages": MESSAGES, "max_tokens": 9, "temperature": 0, "ignore_eos": True, "logit_bias": {str(first): 100}}
    answer = shared.post("/v1/chat/completions", **chat).json()["choices"][0]["message"]["content"]
    assert answer == answer[: len(answer) // 9] * 9


def test_best_of_shows_the_likeliest(shared: WorkerProcess) -> None:
    def mean(choice: dict[str, Any]) -> float:
        return sum(choice["logprobs"]["token_logprobs"]) / len(choice["logprobs"]["tokens"])

    body = {"prompt": [PROMPT, "Other words"], "max_tokens": 12, "seed": 21, "temperature": 1.3, "logprobs": 0}
    every = shared.complete(**body, n=6)["choices"]
    answer = shared.complete(**body, n=2, best_of=6)
    expected = [sorted(group, key=mean, reverse=True)[:2] for group in (every[:6], every[6:])]
    texts = [choice["text"] for choice in answer["choices"]]
    assert texts == [choice["text"] for group in expected for choice in group]
    assert texts != [choice["text"] for choice in (*every[:2], *every[6:8])], "a seed for which the first are the best shows nothing"
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert answer["usage"]["completion_tokens"] == sum(len(choice["logprobs"]["tokens"]) for choice in every), "all that was generated"
    silent = shared.complete(**body | {"logprobs": None}, n=2, best_of=6, echo=True)["choices"]
    assert [(c["text"], c["logprobs"]) for c in silent[:2]] == [(PROMPT + text, None) for text in texts[:2]]


def test_the_second_identical_prompt_is_cached(shared: WorkerProcess) -> None:
    prompt = "A prompt that no other test has. " * 20
    first, second = (shared.post("/v1/completions", prompt=prompt, max_tokens=2) for _ in range(2))
    assert first.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    cached = second.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached >= second.json()["usage"]["prompt_tokens"] - 16
    assert second.headers["x-fairlead-cached-tokens"] == str(cached)


def test_completion_logprobs(shared: WorkerProcess) -> None:
    choice = shared.complete(prompt=PROMPT, logprobs=2, **GREEDY)["choices"][0]
    logprobs = choice["logprobs"]
    assert {name: len(values) for name, values in logprobs.items()} == dict.fromkeys(
        ("tokens", "token_logprobs", "top_logprobs", "text_offset"), 24
    )
    for token, value, top in zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True):
        assert value <= 0
        assert top[token] == value == max(top.values())  # greedy
    assert logprobs["text_offset"][0] == 0


def test_chat_logprobs_with_the_openai_client(sdk: openai.OpenAI) -> None:
    answer = sdk.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=4, logprobs=True, top_logprobs=3, temperature=0, extra_body={"ignore_eos": True}
    )
    content = answer.choices[0].logprobs.content
    assert len(content) == answer.usage.completion_tokens == 4
    for entry in content:
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].logprob == entry.logprob
        assert all(0 <= byte < 256 for byte in entry.bytes)


def test_the_openai_client_streams_and_lists(sdk: openai.OpenAI) -> None:
    assert [model.id for model in sdk.models.list()] == ["tiny"]
    assert sdk.models.retrieve("tiny").id == "tiny"
    parts = [{"role": "user", "content": [{"type": "text", "text": "Tell me"}, {"type": "text", "text": "of ships."}]}]
    stream = sdk.chat.completions.create(
        model="tiny", messages=parts, stream=True, max_tokens=5, stream_options={"include_usage": True}, extra_body={"ignore_eos": True}
    )
    chunks = list(stream)
    assert chunks[-1].usage.completion_tokens == 5
    assert chunks[-2].choices[0].finish_reason == "length"
    with pytest.raises(openai.NotFoundError) as error:
        sdk.completions.create(model="other", prompt="x")
    assert error.value.code == "model_not_found"
    assert error.value.param == "model"


def test_token_ids_as_a_prompt_and_the_tokenized_form(shared: WorkerProcess) -> None:
    tokens = shared.post("/tokenize", prompt=PROMPT).json()["tokens"]
    assert shared.post("/detokenize", tokens=tokens).json() == {"prompt": PROMPT}
    expected = shared.complete(prompt=PROMPT, **GREEDY)
    by_ids = shared.complete(prompt=tokens, **GREEDY)
    body = array("I", tokens).tobytes() + msgspec.json.encode({"model": "tiny", **GREEDY})
    tokenized = shared.client.post("/v1/completions", content=body, headers={"X-Fairlead-Prompt-Tokens": str(len(tokens))}).json()
    for answer in (by_ids, tokenized):
        assert answer["choices"] == expected["choices"]
        assert answer["usage"]["prompt_tokens"] == len(tokens)
    chat = shared.post("/tokenize", messages=MESSAGES).json()["tokens"]
    chat_body = array("I", chat).tobytes() + msgspec.json.encode({"messages": [], "max_tokens": 4, "temperature": 0})
    answer = shared.client.post("/v1/chat/completions", content=chat_body, headers={"X-Fairlead-Prompt-Tokens": str(len(chat))}).json()
    plain = shared.post("/v1/chat/completions", messages=MESSAGES, max_tokens=4, temperature=0).json()
    assert answer["choices"] == plain["choices"]
    tools = [{"type": "function", "function": {"name": "weather"}}]  # a template that renders these messages would fail, so none does
    chat_body = array("I", chat).tobytes() + msgspec.json.encode({"messages": [{}], "tools": tools, "max_tokens": 4, "temperature": 0})
    answer = shared.client.post("/v1/chat/completions", content=chat_body, headers={"X-Fairlead-Prompt-Tokens": str(len(chat))}).json()
    assert answer["choices"] == plain["choices"] and answer["usage"]["prompt_tokens"] == len(chat)


def test_token_ids_of_another_prompt_format_are_not_taken(shared: WorkerProcess) -> None:
    etag = shared.client.get("/internal/prompt-format").headers["etag"]
    expected = shared.complete(prompt=PROMPT, **GREEDY)
    foreign = array("I", [5, 6, 7])
    body = foreign.tobytes() + msgspec.json.encode({"prompt": PROMPT, **GREEDY})
    for tag, tokens in ((etag, 3), ('"another"', expected["usage"]["prompt_tokens"])):
        headers = {"X-Fairlead-Prompt-Tokens": "3", "X-Fairlead-Prompt-Format": tag}
        answer = shared.client.post("/v1/completions", content=body, headers=headers).json()
        assert answer["usage"]["prompt_tokens"] == tokens
    assert answer["choices"] == expected["choices"]


def test_a_long_text_is_tokenized_as_in_parts_and_as_a_whole(shared: WorkerProcess) -> None:
    encoder = PromptEncoder(msgspec.json.decode(shared.client.get("/internal/prompt-format").content, type=PromptFormat))
    chat = [{"role": ("user", "assistant")[turn % 2], "content": f"turn {turn}: naïve 🎉 <|im_end|> words " * 9} for turn in range(8)]
    for turns in range(1, len(chat) + 1):  # the worker has cached the earlier turns; this encoder has no cache
        tokens = shared.post("/tokenize", messages=chat[:turns]).json()["tokens"]
        assert tokens == encoder.encode_chat(chat[:turns]).tolist()


def test_the_prompt_format_makes_the_same_tokens_elsewhere(shared: WorkerProcess) -> None:
    response = shared.client.get("/internal/prompt-format")
    encoder = PromptEncoder(msgspec.json.decode(response.content, type=PromptFormat))
    assert encoder.encode_text(PROMPT).tolist() == shared.post("/tokenize", prompt=PROMPT).json()["tokens"]
    assert encoder.encode_chat(MESSAGES).tolist() == shared.post("/tokenize", messages=MESSAGES).json()["tokens"]
    again = shared.client.get("/internal/prompt-format", headers={"If-None-Match": response.headers["etag"]})
    assert again.status_code == 304
    etag = response.headers["etag"]
    several = shared.client.get("/internal/prompt-format", headers={"If-None-Match": f'"older", {etag}'})
    assert several.status_code == 304 and several.headers["etag"] == etag
    plain = shared.client.get("/internal/prompt-format", headers={"Accept-Encoding": "identity"})
    assert "content-encoding" not in plain.headers and response.headers["content-encoding"] == "gzip"
    assert plain.content == response.content and plain.headers["etag"] == etag
    assert int(response.headers["content-length"]) < len(plain.content) / 2


def test_state(shared: WorkerProcess) -> None:
    for path in ("/health", "/ready", "/version", "/metrics"):
        assert shared.client.get(path).status_code == 200, path
    load = shared.load()
    assert (load["pod"], load["address"], load["ready"], load["draining"]) == ("pod-0", f"127.0.0.1:{shared.port}", True, False)
    assert load["page_size"] == 16 and load["canary"] == "new"
    model = shared.client.get("/v1/models").json()["data"][0]
    assert (model["id"], model["max_model_len"]) == ("tiny", 4096)


def test_metrics_count(shared: WorkerProcess) -> None:
    names = ("prompt_tokens_total", "generation_tokens_total", "e2e_request_latency_seconds_count", "prefix_cache_queries_total")
    before = [shared.metric(f"fairlead_{name}") for name in names]
    usage = shared.complete(prompt=PROMPT, max_tokens=5, ignore_eos=True)["usage"]
    after = [shared.metric(f"fairlead_{name}") for name in names]
    assert [b - a for a, b in zip(before, after, strict=True)] == [usage["prompt_tokens"], 5, 1, usage["prompt_tokens"]]
    load = shared.load()
    assert [load["prompt_tokens"], load["output_tokens"]] == after[:2], "routers pass the same counters on"
    assert load["cached_tokens"] == shared.metric("fairlead_prefix_cache_hits_total")


def test_the_request_id_comes_back(shared: WorkerProcess) -> None:
    response = shared.client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}, headers={"X-Request-Id": "mine-1"})
    assert response.headers["x-request-id"] == "mine-1"
    assert response.json()["id"] == "cmpl-mine-1"
