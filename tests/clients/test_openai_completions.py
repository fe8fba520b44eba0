"""`client.completions` and `client.models`, blocking and asynchronous, through worker and router alike."""

from typing import Any

import openai
import pytest
from openai.types import Completion, Model
from tests.clients.either import all_of, each, settled
from tests.clients.endpoints import MODEL

pytestmark = pytest.mark.asyncio(loop_scope="session")
PROMPT = "The quick brown fox jumps over the lazy dog"
SEEDED: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "seed": 5, "max_tokens": 16}


async def create(api: Any, **options: Any) -> Completion:
    answer = await settled(api.completions.create(**SEEDED | options))
    assert isinstance(answer, Completion)
    return answer


async def test_models_are_listed_and_found_by_name(api: Any) -> None:
    (model,) = [model async for model in each(api.models.list())]
    assert isinstance(model, Model) and (model.id, model.object) == (MODEL, "model") and model.created > 1.7e9 and model.owned_by
    assert model.max_model_len == 4096 and model.root and model.parent is None, "vLLM's fields"  # type: ignore[attr-defined]
    assert await settled(api.models.retrieve(MODEL)) == model
    with pytest.raises(openai.NotFoundError) as refused:
        await settled(api.models.retrieve("a/model of nobody"))
    assert refused.value.code == "model_not_found"


async def test_a_whole_answer(api: Any) -> None:
    answer = await create(api)
    assert answer.id.startswith("cmpl-") and answer.object == "text_completion" and answer.model == MODEL
    (choice,) = answer.choices
    assert choice.text and choice.finish_reason in ("stop", "length") and choice.logprobs is None and choice.index == 0
    assert answer.usage is not None and answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


async def test_a_stream_adds_up_to_the_whole_answer(lenient: Any) -> None:
    options = {"prompt": [PROMPT, "Another"], "n": 2, "logprobs": 2}
    whole = await create(lenient, **options)
    chunks = await all_of(
        await settled(lenient.completions.create(**SEEDED | options, stream=True, stream_options={"include_usage": True}))
    )
    *parts, last = chunks
    assert last.choices == [] and last.usage.completion_tokens == whole.usage.completion_tokens
    assert last.usage.prompt_tokens == whole.usage.prompt_tokens
    assert last.usage.prompt_tokens_details.cached_tokens > 0, "the same prompts again"
    texts, tokens, ends = {}, {}, {}  # type: ignore[var-annotated]
    for chunk in parts:
        assert isinstance(chunk, Completion) and chunk.usage is None
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            tokens.setdefault(choice.index, []).extend(choice.logprobs.tokens if choice.logprobs else [])
            if choice.finish_reason:
                ends[choice.index] = choice.finish_reason
    assert [texts[at] for at in range(4)] == [choice.text for choice in whole.choices]
    assert [tokens[at] for at in range(4)] == [choice.logprobs.tokens for choice in whole.choices]  # type: ignore[union-attr]
    assert [ends[at] for at in range(4)] == [choice.finish_reason for choice in whole.choices]


async def test_token_ids_are_a_prompt(api: Any) -> None:
    given = await create(api, prompt=[5, 6, 7, 300])
    assert given.usage is not None and given.usage.prompt_tokens == 4
    many = await create(api, prompt=[[5, 6, 7, 300], [8]])
    assert len(many.choices) == 2 and many.choices[0].text == given.choices[0].text


async def test_the_prompt_is_echoed_with_its_logprobs(lenient: Any) -> None:
    answer = await create(lenient, echo=True, logprobs=2, max_tokens=3, temperature=0, extra_body={"ignore_eos": True})
    (choice,) = answer.choices
    assert choice.text.startswith(PROMPT) and choice.logprobs is not None
    scores = choice.logprobs.token_logprobs
    assert scores is not None and scores[0] is None and all(score is not None and score <= 0 for score in scores[1:])
    tokens, offsets, tops = choice.logprobs.tokens, choice.logprobs.text_offset, choice.logprobs.top_logprobs
    assert tokens is not None and offsets is not None and tops is not None and len(tokens) == len(scores) == len(offsets) == len(tops)
    assert answer.usage is not None and len(tokens) == answer.usage.prompt_tokens + 3
    only = await create(lenient, echo=True, max_tokens=0)
    assert only.choices[0].text == PROMPT and only.choices[0].finish_reason == "length"


async def test_best_of_returns_the_most_likely_answer(api: Any) -> None:
    one, best = await create(api), await create(api, best_of=4)
    assert len(best.choices) == 1 and best.usage is not None and one.usage is not None
    assert best.usage.completion_tokens > one.usage.completion_tokens
    with pytest.raises(openai.BadRequestError) as refused:
        await create(api, best_of=1, n=2)
    assert refused.value.param == "best_of"


async def test_stop_strings_seeds_and_penalties(api: Any) -> None:
    free = (await create(api, extra_body={"ignore_eos": True})).choices[0].text
    stop = next(free[at : at + 2] for at in range(len(free) // 2, len(free)) if free[at : at + 2].isascii())
    cut = (await create(api, stop=stop, extra_body={"ignore_eos": True})).choices[0]
    assert (cut.text, cut.finish_reason) == (free[: free.index(stop)], "stop")
    assert (await create(api)).choices[0].text == (await create(api)).choices[0].text != (await create(api, seed=6)).choices[0].text
    plain = await create(api, temperature=0, max_tokens=60)
    pressed = await create(api, temperature=0, max_tokens=60, presence_penalty=2, frequency_penalty=2, logit_bias={"400": 5}, top_p=0.9)
    assert plain.choices[0].text != pressed.choices[0].text
