"""Prompt log-probabilities equal log_softmax of transformers' own forward, for any chunks, pages, batch and preemptions."""

from array import array
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tests.models import FAMILIES, save_model
from tests.worker.exactness.harness import LENGTHS, Engine, generate, make_prompts
from transformers import PreTrainedModel

from fairlead_worker.execution import runner, scoring
from fairlead_worker.ipc.messages import Output, Sampling, Submit, TokenLogprobs
from fairlead_worker.model.loader import LoadedModel, load_model

CHOSEN = [i for i, length in enumerate(LENGTHS) if length <= 333]
TOP = 3
Served = tuple[list[int], list[TokenLogprobs], int]


def serve(engine: Engine, prompts: list[list[int]], ask: list[int | None], max_tokens: int = 20) -> list[Served]:
    """(output tokens, prompt log-probabilities, cached tokens) of each prompt; all are submitted at once."""
    names = [str(engine.submitted + i) for i in range(len(prompts))]
    engine.submitted += len(prompts)
    for name, prompt, top in zip(names, prompts, ask, strict=True):
        sampling = Sampling(max_tokens=max_tokens, ignore_eos=True, temperature=0, prompt_logprobs=top)
        assert engine.scheduler.submit(Submit(name, array("I", prompt).tobytes(), sampling, 0)) is None
    outputs: dict[str, list[Output]] = {name: [] for name in names}
    while plan := engine.scheduler.plan():
        scoring_rows = [row for row in plan.rows if row.request.to_score(row.start, row.end)]
        assert plan.scores == len(scoring_rows)
        engine.mixed_steps += bool(scoring_rows and plan.decodes)
        for output in engine.scheduler.advance(plan, engine.runner.execute(plan)):
            outputs[output.id].append(output)
    assert engine.scheduler.idle
    for each in outputs.values():
        assert not any(output.prompt_logprobs for output in each[1:]), "they come with the first token, once"
    return [
        (
            [t for output in outputs[name] for t in array("I", output.tokens)],
            list(outputs[name][0].prompt_logprobs),
            outputs[name][0].cached_tokens,
        )
        for name in names
    ]


def check(model: PreTrainedModel, prompt: list[int], got: list[TokenLogprobs], top: int = TOP) -> None:
    assert len(got) == len(prompt) - 1
    if not got:
        return
    with torch.no_grad():
        want = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
    chosen = want[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor([each.chosen for each in got]), chosen, atol=1e-4, rtol=0)
    likeliest = want[:-1].topk(top)
    torch.testing.assert_close(torch.tensor([each.top_logprobs for each in got]), likeliest.values, atol=1e-4, rtol=0)
    at = want[:-1].gather(1, torch.tensor([each.top_ids for each in got]))
    torch.testing.assert_close(at, likeliest.values, atol=1e-4, rtol=0)  # ties apart, the same tokens
    for each, row, value in zip(got, want[:-1], chosen, strict=True):
        assert (row > value + 1e-4).sum() < each.rank <= (row > value - 1e-4).sum()


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, LoadedModel]:
    return load(request.param, tmp_path_factory.mktemp(request.param))


def load(name: str, folder: Path) -> tuple[PreTrainedModel, LoadedModel]:
    model = save_model(name, folder)
    return model, load_model(str(folder))


PROMPTS = [prompt for i, prompt in enumerate(make_prompts()) if i in CHOSEN]


@pytest.mark.parametrize("chunk", [16, 64, 0], ids=["16", "64", "off"])
def test_they_are_the_models_own(family: tuple[PreTrainedModel, LoadedModel], chunk: int) -> None:
    model, loaded = family
    engine = Engine(loaded, chunk)
    for served in (serve(engine, PROMPTS, [TOP] * len(PROMPTS)), serve(engine, PROMPTS, [TOP] * len(PROMPTS))):  # cold, warm
        for prompt, (_, got, cached) in zip(PROMPTS, served, strict=True):
            check(model, prompt, got)
            assert cached == 0, "cached positions have no logits"
    assert engine.mixed_steps or not chunk, "prompts are scored beside decodes"


def test_half_of_them_ask_and_nobodys_tokens_change(family: tuple[PreTrainedModel, LoadedModel]) -> None:
    model, loaded = family
    expected = generate(model, PROMPTS)
    engine = Engine(loaded, 64)
    ask = [(None, TOP)[i % 2] for i in range(len(PROMPTS))]
    for turn in range(2):
        for i, (tokens, got, cached) in enumerate(serve(engine, PROMPTS, ask)):
            assert tokens == expected[i]
            if ask[i] is None:
                assert got == []
                assert turn == 0 or cached == (len(PROMPTS[i]) - 1) // 16 * 16, "what they compute is published"
            else:
                check(model, PROMPTS[i], got)


@pytest.mark.parametrize("page_size", [1, 5, 64])
def test_page_sizes(page_size: int, tmp_path: Path) -> None:
    model, loaded = load("gemma2", tmp_path)
    engine = Engine(loaded, 64, pages=16384 // page_size, page_size=page_size)
    for prompt, (_, got, _) in zip(PROMPTS, serve(engine, PROMPTS, [TOP] * len(PROMPTS)), strict=True):
        check(model, prompt, got)


@pytest.mark.parametrize("chunk", [16, 64, 0], ids=["16", "64", "off"])
def test_after_retraction_nothing_is_told_twice(chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, loaded = load("llama", tmp_path)
    prompts = PROMPTS[3:14]
    expected = [tokens for tokens, _, _ in serve(Engine(loaded, 0), prompts, [None] * len(prompts), 120)]
    optimist = {"initial_new_token_ratio": 0.0, "min_new_token_ratio": 0.0}
    engine = Engine(loaded, chunk, pages=90, page_size=4, settings=optimist)
    scored: list[int] = []
    before = runner.positions_to_score
    monkeypatch.setattr(runner, "positions_to_score", lambda plan: (scored.append(len((places := before(plan))[0])), places)[1])
    served = serve(engine, prompts, [TOP] * len(prompts), 120)
    assert engine.scheduler.load().preemptions > 3
    for prompt, tokens, (got_tokens, got, _) in zip(prompts, expected, served, strict=True):
        assert got_tokens == tokens
        check(model, prompt, got)
    assert sum(scored) == sum(len(prompt) - 1 for prompt in prompts), "each position once, however often it is computed"


def test_a_request_retracted_within_its_prompt_goes_on_where_it_was(tmp_path: Path) -> None:
    model, loaded = load("llama", tmp_path)
    engine = Engine(loaded, 16)
    prompt = PROMPTS[-1]
    sampling = Sampling(max_tokens=1, temperature=0, prompt_logprobs=TOP)
    engine.scheduler.submit(Submit("r", array("I", prompt).tobytes(), sampling, 0))
    got: list[TokenLogprobs] = []
    for step in range(1000):
        plan = engine.scheduler.plan()
        if step == 5:  # as the scheduler does where pages run out
            request = plan.rows[0].request
            engine.scheduler.advance(plan, engine.runner.execute(plan))
            engine.scheduler.preempt(request)
            engine.scheduler.waiting.add(request, lost_pages=True)
            assert request.prompt_logprobs is not None and request.prompt_logprobs.scored == 96
            continue
        if step == 6:
            assert plan.rows[0].start == 96, "what was scored may come from the cache"
        if outputs := engine.scheduler.advance(plan, engine.runner.execute(plan)):
            (output,) = outputs
            got = list(output.prompt_logprobs)
            break
    check(model, prompt, got)


def test_logits_of_a_long_chunk_are_computed_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, loaded = load("gemma2", tmp_path)
    monkeypatch.setattr(scoring, "BLOCK_LOGITS", 8 * loaded.vocabulary_size)
    engine = Engine(loaded, 0)
    whole, sizes = engine.runner.forward.score, []

    def in_blocks(*step):
        logits, places = whole(*step)
        return logits, SimpleNamespace(logits=lambda some: (sizes.append(len(at := places.logits(some))), at)[1])

    monkeypatch.setattr(engine.runner.forward, "score", in_blocks)
    ((_, got, _),) = serve(engine, [PROMPTS[-1]], [TOP])
    check(model, PROMPTS[-1], got)
    assert max(sizes) == 8
    assert sum(sizes) == len(PROMPTS[-1]) - 1


def test_a_cpu_scores_few_positions_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, loaded = load("llama", tmp_path)
    monkeypatch.setattr(scoring, "CACHED_LOGITS", 3 * loaded.vocabulary_size)
    score, sizes = scoring._score_block, []
    monkeypatch.setattr(scoring, "_score_block", lambda logits, *rest: (sizes.append(len(logits)), score(logits, *rest))[1])
    ((_, got, _),) = serve(Engine(loaded, 0), [PROMPTS[-1]], [TOP])
    check(model, PROMPTS[-1], got)
    assert max(sizes) == 3
    assert sum(sizes) == len(PROMPTS[-1]) - 1


def test_each_row_gets_as_many_as_it_asked_for(tmp_path: Path) -> None:
    model, loaded = load("qwen3", tmp_path)
    ask = [0, 1, 5, None, 20] * 3
    served = serve(Engine(loaded, 512), PROMPTS[: len(ask)], ask[: len(PROMPTS)])
    for prompt, top, (_, got, _) in zip(PROMPTS, ask, served, strict=False):
        assert all(len(each.top_ids) == top for each in got)
        if top:
            check(model, prompt, got, top)
