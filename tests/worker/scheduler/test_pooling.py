"""Prompts whose hidden states are wanted, among others and short of pages: each position once, and every invariant after every step."""

import random

import pytest
from tests.worker.scheduler.engine_model import EngineModel

from fairlead_worker.ipc.messages import PoolingKind

KINDS: tuple[PoolingKind | None, ...] = (None, "last", "mean")


@pytest.mark.parametrize("policy", ["lpm", "fcfs"])
@pytest.mark.parametrize("mixed", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_each_position_is_pooled_once_beside_any_requests(seed: int, mixed: bool, policy: str) -> None:
    chooser = random.Random(seed)
    machine = EngineModel(
        14, 4, chunked_prefill_size=8, enable_mixed_chunk=mixed, policy=policy, initial_new_token_ratio=0.0, min_new_token_ratio=0.0
    )
    wants: dict[str, list[int]] = {}
    for _ in range(40):
        prompt = [chooser.randrange(2, 5) for _ in range(chooser.randrange(1, 30))]
        kind = chooser.choice(KINDS)
        name = machine.submit(prompt, chooser.randrange(12, 24), priority=chooser.randrange(3), pooling=kind)
        wants[name] = list(range(len(prompt))) if kind == "mean" else [len(prompt) - 1] if kind == "last" else []
        for _ in range(chooser.randrange(3)):
            if machine.step():
                machine.check()
        if chooser.random() < 0.1:
            machine.abort(name)
    machine.run()
    machine.check_answers()
    assert machine.scheduler.load().preemptions > 0
    for name, positions in wants.items():
        told = machine.told[name]
        assert told.finish == "abort" or told.pooled == positions, name


def test_a_pooled_prompt_may_fill_the_longest_sequence() -> None:
    machine = EngineModel(8, 4, max_model_len=20)
    whole, longer = machine.submit([5] * 20, pooling="mean"), machine.submit([5] * 21, pooling="last")
    machine.run()
    assert machine.told[whole].pooled == list(range(20)) and machine.told[whole].finish == "stop"
    assert machine.told[longer].error == "the text has 21 tokens, but the longest here is 20: shorten it"


def test_a_model_that_cannot_pool_or_generate_refuses() -> None:
    machine = EngineModel(8, 4, prompt_logprobs=False)
    assert "embeddings cannot be computed" in machine.told[machine.submit([5], pooling="last")].error
    headless = EngineModel(8, 4, generates=False)
    assert "no language-modelling head" in headless.told[headless.submit([5])].error
