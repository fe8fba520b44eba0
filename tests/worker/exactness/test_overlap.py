"""The overlapped loop gives the plain loop's tokens on real models: on a thread of its own, immediately, and as late as possible."""

import random
from array import array
from pathlib import Path

import pytest
from tests.models import VOCABULARY, save_model
from tests.worker.streams import Late, Thread

from fairlead_index.hashing import extend
from fairlead_worker.cache.pages import PagePool
from fairlead_worker.cache.prefix import PrefixCache
from fairlead_worker.engine.overlap import Overlap
from fairlead_worker.engine.request_timer import RequestTimer
from fairlead_worker.execution.overlap import OverlappedRunner
from fairlead_worker.execution.runner import ModelRunner
from fairlead_worker.execution.runner_builder import RunnerBuilder
from fairlead_worker.execution.stream import DeviceStream
from fairlead_worker.ipc.messages import Output, Sampling, Submit, ThinkingBudget
from fairlead_worker.model.loader import LoadedModel, load_model
from fairlead_worker.native.library import native
from fairlead_worker.scheduler.config import SchedulerConfig
from fairlead_worker.scheduler.overlap_scheduler import OverlapScheduler
from fairlead_worker.scheduler.plan import StepPlan, StepResult
from fairlead_worker.scheduler.scheduler import Scheduler

PAGE = 16


LANES = {"thread": Thread, "late": Late, "at once": DeviceStream}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder: Path = tmp_path_factory.mktemp("llama")
    save_model("llama", folder)
    return load_model(str(folder))


def work() -> list[Submit]:
    """Return requests of all kinds: lengths, shared prefixes, n of one prompt, noise, penalties, bans, log-probabilities, early stops."""
    chooser = random.Random(5)
    stems = [[chooser.randrange(2, VOCABULARY) for _ in range(200)] for _ in range(3)]
    made: list[Submit] = []
    for number in range(24):
        stem = stems[number % 3][: chooser.choice([1, 15, 16, 33, 64, 130, 200])]
        prompt = stem + [chooser.randrange(2, VOCABULARY) for _ in range(chooser.choice([0, 1, 5]))]
        kinds: list[dict[str, object]] = [
            {},
            {"temperature": 1.0, "seed": number},
            {"temperature": 0.8, "top_p": 0.9, "top_k": 30, "seed": number, "logprobs": 2},
            {"presence_penalty": 0.8, "repetition_penalty": 1.3, "frequency_penalty": 0.3},
            {"temperature": 1.0, "seed": number, "stop_token_ids": tuple(range(2, 60)), "min_tokens": 4},
            {"bad_words": ((stem[0],), (3, 4)), "logit_bias": ((9, 3.0), (10, 3.0))},
            {"logprobs": 3, "thinking": ThinkingBudget(number % 5, (2,), (9, 7, 9), used=0)},
            {"prompt_logprobs": 1} if number % 2 else {"allowed_token_ids": tuple(range(2, 40)), "min_tokens": 2, "stop_token_ids": (5, 6)},
        ]
        settings = {"temperature": 0.0, "max_tokens": chooser.choice([1, 2, 9, 30]), "ignore_eos": True} | kinds[number % len(kinds)]
        for copy in range(3 if number % 10 == 0 else 1):
            name = f"{number}.{copy}"
            made.append(Submit(name, array("I", prompt).tobytes(), Sampling(**settings), 0, number % 3, f"t{number % 2}"))  # type: ignore[arg-type]  # each its field's type
    return made


def parts(loaded: LoadedModel, pages: int, **settings: object) -> tuple[SchedulerConfig, PrefixCache, ModelRunner]:
    config = SchedulerConfig(loaded.max_model_len, **settings)  # type: ignore[arg-type]  # each its field's type
    # The compiled kernels give a row the same bits in any batch. torch's attention does so only with `--deterministic`.
    runner = RunnerBuilder(loaded=loaded, page_size=PAGE, kv_pages=pages, deterministic=native() is None).build()
    return config, PrefixCache(PagePool(pages, PAGE), 2 * PAGE, extend), runner


@pytest.fixture(scope="module")
def expected(loaded: LoadedModel) -> "Said":
    return plain(loaded, 512, chunked_prefill_size=48)


Said = dict[str, tuple[list[int], str, list[object], list[object]]]


def collect(outputs: dict[str, list[Output]]) -> Said:
    """Return tokens, end and log-probabilities of all requests that were not aborted."""
    return {
        name: (
            array("I", b"".join(one.tokens for one in told)).tolist(),
            str(told[-1].finish),
            [each for one in told for each in one.logprobs],
            [each for one in told for each in one.prompt_logprobs],
        )
        for name, told in outputs.items()
        if told[-1].finish != "abort"
    }


def plain(loaded: LoadedModel, pages: int, **settings: object) -> Said:
    config, cache, runner = parts(loaded, pages, **settings)
    scheduler = Scheduler(config, cache)
    outputs: dict[str, list[Output]] = {}
    for submit in work():
        assert scheduler.submit(submit) is None
    while plan := scheduler.plan():
        for output in scheduler.advance(plan, runner.execute(plan)):
            outputs.setdefault(output.id, []).append(output)
    return collect(outputs)


def overlapped(loaded: LoadedModel, lane: str, pages: int, aborted: int = 0, **settings: object) -> Said:
    """Run with arrivals spread over the steps. `aborted`: number of requests aborted on the way."""
    config, cache, runner = parts(loaded, pages, **settings)
    scheduler = Scheduler(config, cache)
    outputs: dict[str, list[Output]] = {}

    def tell(plan: StepPlan, result: StepResult, told: list[Output]) -> None:
        for output in told:
            outputs.setdefault(output.id, []).append(output)

    ahead = OverlappedRunner(runner, LANES[lane]())
    launches = 0
    launch = ahead.launch

    def counted(plan: StepPlan):  # type: ignore[no-untyped-def]  # as `launch`
        nonlocal launches
        launches += 1
        return launch(plan)

    ahead.launch = counted  # type: ignore[method-assign]  # counts
    overlap = Overlap(OverlapScheduler(scheduler), ahead, RequestTimer(), tell)
    waiting, drawn, names = work(), random.Random(3), list[str]()
    while waiting or not scheduler.idle:
        for submit in [waiting.pop(0) for _ in range(min(len(waiting), drawn.choice([0, 1, 5])))]:
            assert scheduler.submit(submit) is None
            names.append(submit.id)
        if len(names) > 4 and aborted and drawn.random() < 0.2:
            aborted -= 1
            answer = scheduler.abort(drawn.choice(names[-4:]))
            if answer is not None:
                outputs.setdefault(answer.id, []).append(answer)
        overlap.step()
    overlap.reconcile()
    assert launches > 10
    assert cache.available == pages
    return collect(outputs)


@pytest.mark.parametrize(
    ("lane", "pages", "settings"),
    [
        ("thread", 512, {"chunked_prefill_size": 48}),
        ("late", 512, {"chunked_prefill_size": 0}),
        ("late", 512, {"chunked_prefill_size": 32, "enable_mixed_chunk": False, "policy": "lpm"}),
        ("thread", 24, {"chunked_prefill_size": 48, "initial_new_token_ratio": 0.0, "min_new_token_ratio": 0.0}),
        ("at once", 40, {"chunked_prefill_size": 16, "policy": "lpm"}),
    ],
    ids=["chunked", "whole", "unmixed", "scarce", "priority"],
)
def test_the_overlapped_loop_says_what_the_plain_one_says(
    loaded: LoadedModel, expected: Said, lane: str, pages: int, settings: dict[str, object]
) -> None:
    assert overlapped(loaded, lane, pages, **settings) == expected


@pytest.mark.parametrize("lane", ["thread", "late"])
def test_aborts_change_nobody_elses_answer(loaded: LoadedModel, expected: Said, lane: str) -> None:
    said = overlapped(loaded, lane, 64, aborted=12, chunked_prefill_size=48)
    assert len(said) < len(expected)
    assert said == {name: expected[name] for name in said}
