"""Log-probabilities of prompts over HTTP: vLLM's `prompt_logprobs`, and `echo` with `logprobs` as evaluation harnesses use it."""

from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest
import torch
from tests.worker.api.process import WorkerProcess
from transformers import AutoModelForCausalLM

from fairlead_common.prompts.encoder import PromptEncoder, PromptFormat

PROMPT = "The quick brown fox jumps over the lazy dog and runs away from the cat. " * 3


@pytest.fixture(scope="module")
def encoder(shared: WorkerProcess) -> PromptEncoder:
    return PromptEncoder(msgspec.json.decode(shared.client.get("/internal/prompt-format").content, type=PromptFormat))


@pytest.fixture(scope="module")
def oracle(model: Path, shared: WorkerProcess) -> Any:
    """transformers as a function [tokens] -> [tokens, vocabulary], in the dtype that the worker chose."""
    return AutoModelForCausalLM.from_pretrained(model, dtype="auto")


def expected(oracle: Any, tokens: list[int]) -> list[float]:
    with torch.no_grad():
        rows = oracle(torch.tensor([tokens])).logits[0].float().log_softmax(-1)
    return rows[:-1].gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].tolist()


def close(got: list[float], want: list[float], oracle: Any) -> None:
    assert got == pytest.approx(want, abs=1e-4 if oracle.dtype == torch.float32 else 0.05)


def test_prompt_logprobs_have_vllms_shape(shared: WorkerProcess, encoder: PromptEncoder, oracle: Any) -> None:
    answer = shared.complete(prompt=PROMPT, max_tokens=3, temperature=0, prompt_logprobs=2)
    tokens = encoder.encode_text(PROMPT).tolist()
    (choice,) = answer["choices"]
    got = choice["prompt_logprobs"]
    assert len(got) == len(tokens)
    assert got[0] is None
    for token, entries in zip(tokens[1:], got[1:], strict=True):
        own, *others = entries.items()
        assert own[0] == str(token)
        assert own[1]["decoded_token"] == encoder.decode((token,), skip_special_tokens=False)
        assert len(entries) == (2 if own[1]["rank"] <= 2 else 3)
        assert sorted({own[1]["rank"], *(entry["rank"] for _, entry in others)})[:2] == [1, 2]
        assert all((entry["logprob"] <= own[1]["logprob"]) == (entry["rank"] >= own[1]["rank"]) for _, entry in others)
    close([entries[str(token)]["logprob"] for token, entries in zip(tokens[1:], got[1:], strict=True)], expected(oracle, tokens), oracle)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert shared.complete(prompt=PROMPT, max_tokens=1)["choices"][0]["prompt_logprobs"] is None


def test_a_chat_has_them_beside_its_choices(shared: WorkerProcess, oracle: Any, encoder: PromptEncoder) -> None:
    messages = [{"role": "user", "content": "Tell me of the sea."}]
    answer = shared.post("/v1/chat/completions", messages=messages, max_tokens=2, prompt_logprobs=0).json()
    tokens = encoder.encode_chat(messages).tolist()
    got = [
        float("nan") if each is None else each[str(token)]["logprob"] for token, each in zip(tokens, answer["prompt_logprobs"], strict=True)
    ]
    close(got[1:], expected(oracle, tokens), oracle)


@pytest.mark.parametrize("max_tokens", [0, 1, 4])
def test_echo_shows_the_prompts_logprobs(shared: WorkerProcess, encoder: PromptEncoder, oracle: Any, max_tokens: int) -> None:
    """lm-eval reads the continuation's log-probabilities as a slice of the prompt's."""
    sdk = openai.OpenAI(base_url=f"{shared.url}/v1", api_key="none", max_retries=0)
    tokens = encoder.encode_text(PROMPT).tolist()
    plain = shared.complete(prompt=tokens, temperature=0, max_tokens=4, logprobs=2, ignore_eos=True)["choices"][0]
    answer = sdk.completions.create(
        model="tiny", prompt=tokens, temperature=0, max_tokens=max_tokens, logprobs=2, echo=True, seed=1234, extra_body={"ignore_eos": True}
    )
    (choice,) = answer.choices
    logprobs = choice.logprobs
    assert logprobs is not None and logprobs.token_logprobs is not None and logprobs.top_logprobs is not None
    assert logprobs.tokens is not None and logprobs.text_offset is not None
    assert logprobs.token_logprobs[0] is None and logprobs.top_logprobs[0] is None
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.top_logprobs) == len(tokens) + max_tokens
    close(logprobs.token_logprobs[1 : len(tokens)], expected(oracle, tokens), oracle)
    assert logprobs.tokens[len(tokens) :] == plain["logprobs"]["tokens"][:max_tokens]
    assert logprobs.token_logprobs[len(tokens) :] == pytest.approx(plain["logprobs"]["token_logprobs"][:max_tokens], abs=0.05)
    assert all(text in top for text, top in zip(logprobs.tokens[1:], logprobs.top_logprobs[1:], strict=True))
    assert choice.text.startswith(PROMPT) and logprobs.text_offset[0] == 0
    assert choice.text[logprobs.text_offset[5] :].startswith(logprobs.tokens[5])
    assert choice.finish_reason == "length"
    assert answer.usage is not None and answer.usage.completion_tokens == max_tokens
    if max_tokens == 0:
        assert choice.text == PROMPT


def test_each_of_several_prompts_and_choices_has_its_own(shared: WorkerProcess, encoder: PromptEncoder, oracle: Any) -> None:
    prompts = [PROMPT, "Other words", PROMPT[7:]]
    answer = shared.complete(prompt=prompts, n=2, best_of=3, seed=3, max_tokens=2, echo=True, logprobs=0, prompt_logprobs=1)
    assert len(answer["choices"]) == 6
    for choice in answer["choices"]:
        tokens = encoder.encode_text(prompts[choice["index"] // 2]).tolist()
        close(choice["logprobs"]["token_logprobs"][1 : len(tokens)], expected(oracle, tokens), oracle)
        assert len(choice["prompt_logprobs"]) == len(tokens)


def test_a_prompt_of_one_token_has_none(shared: WorkerProcess) -> None:
    answer = shared.complete(prompt=[5], max_tokens=1, prompt_logprobs=3, echo=True, logprobs=3)
    assert answer["choices"][0]["prompt_logprobs"] == [None]
    assert answer["choices"][0]["logprobs"]["token_logprobs"][0] is None


def test_what_they_computed_is_there_for_others(shared: WorkerProcess) -> None:
    prompt = "Words that no request has had here before, and that go on for some pages. " * 4
    assert shared.complete(prompt=prompt, max_tokens=1, prompt_logprobs=0)["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert shared.complete(prompt=prompt, max_tokens=1)["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert shared.complete(prompt=prompt, max_tokens=0, echo=True)["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
