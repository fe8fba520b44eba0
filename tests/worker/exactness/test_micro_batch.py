"""Prefill micro-batching with the prefix cache: hits attach, the misses of a step share one forward pass, first tokens come in order."""

from array import array

import pytest
from tests.models import save_model
from tests.worker.exactness.harness import Engine, generate, make_prompts

from fairlead_worker.ipc.messages import Output, Sampling, Submit
from fairlead_worker.model.loader import LoadedModel, load_model
from fairlead_worker.scheduler.plan import StepPlan

MIXED = [make_prompts()[i] for i in (6, 12, 8, 10, 4, 13)]
"""Of 31, 100, 48, 64, 16 and 129 tokens."""
WARM = (1, 3, 5)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> tuple[LoadedModel, list[list[int]]]:
    folder = tmp_path_factory.mktemp("llama")
    model = save_model("llama", folder)
    return load_model(str(folder)), generate(model, MIXED)


def submit(engine: Engine, prompts: list[list[int]], first: int = 0) -> None:
    greedy = Sampling(max_tokens=20, temperature=0, ignore_eos=True)
    for number, prompt in enumerate(prompts, first):
        assert engine.scheduler.submit(Submit(f"m{number}", array("I", prompt).tobytes(), greedy, 0)) is None


def step(engine: Engine) -> tuple[StepPlan, list[Output]]:
    plan = engine.scheduler.plan()
    return plan, engine.scheduler.advance(plan, engine.runner.execute(plan))


@pytest.mark.parametrize("policy", ["lpm", "fcfs"])
@pytest.mark.parametrize("host_slots", [0, 200])
def test_hits_attach_and_misses_are_one_forward(served: tuple, policy: str, host_slots: int) -> None:
    """With a host tier, the hits are there: their pages come back in the same step."""
    loaded, expected = served
    engine = Engine(loaded, chunk=0, pages=40, host_slots=host_slots, settings={"policy": policy})
    engine.serve([MIXED[i] for i in WARM])
    if host_slots:
        engine.serve([make_prompts()[16]])  # 512 tokens: nearly all of the device
        engine.serve([make_prompts()[15][:150]], root=1)
    engine.forwards.clear()
    submit(engine, MIXED)
    plan, outputs = step(engine)
    left = [len(prompt) - (len(prompt) - 1) // 16 * 16 * (i in WARM) for i, prompt in enumerate(MIXED)]
    assert engine.forwards == [sum(left)], "one forward pass: the misses whole, of the hits what was not cached"
    assert [output.id for output in outputs] == [f"m{i}" for i in range(6)], "first tokens in the order of the requests"
    assert [list(array("I", output.tokens)) for output in outputs] == [tokens[:1] for tokens in expected]
    assert [output.cached_tokens > 0 for output in outputs] == [i in WARM for i in range(6)]
    assert bool(plan.loads) == bool(host_slots)
    answers = [list(array("I", output.tokens)) for output in outputs]
    while not engine.scheduler.idle:
        for output in step(engine)[1]:
            answers[int(output.id[1:])] += array("I", output.tokens)
    assert answers == expected
    assert engine.forwards[1:] == [6] * 19, "and so are their decodes"


def test_decodes_ride_along_in_the_same_forward(served: tuple) -> None:
    loaded, expected = served
    engine = Engine(loaded, chunk=0)
    submit(engine, MIXED[:2])
    first = step(engine)[1]
    submit(engine, MIXED[2:], first=2)
    engine.forwards.clear()
    second = step(engine)[1]
    assert engine.forwards == [2 + sum(len(prompt) for prompt in MIXED[2:])]
    assert [output.id for output in second] == [f"m{i}" for i in range(6)]
    tokens = [list(array("I", output.tokens)) for output in (*first, *second)]
    assert tokens == [[e[0]] for e in expected[:2]] + [[e[1]] for e in expected[:2]] + [[e[0]] for e in expected[2:]]


def test_equal_prompts_of_one_step_are_computed_once(served: tuple) -> None:
    """The second prompt attaches to pages that the first computes in the same step: the pass has only its unshared tokens."""
    loaded, expected = served
    engine = Engine(loaded, chunk=0)
    submit(engine, [MIXED[1], MIXED[1], MIXED[5]])
    outputs = step(engine)[1]
    assert engine.forwards == [100 + 4 + 129]
    assert [output.id for output in outputs] == ["m0", "m1", "m2"]
    assert [list(array("I", output.tokens)) for output in outputs] == [expected[i][:1] for i in (1, 1, 5)]
