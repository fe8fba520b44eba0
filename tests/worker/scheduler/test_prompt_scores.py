"""Prompts to be scored, among others and short of pages: each position once and in order, and every invariant after every step."""

import random

import pytest
from tests.worker.scheduler.engine_model import EngineModel


@pytest.mark.parametrize("mixed", [True, False])
@pytest.mark.parametrize("seed", range(6))
def test_each_position_is_scored_once_beside_any_requests(seed: int, mixed: bool) -> None:
    chooser = random.Random(seed)
    machine = EngineModel(24, 4, chunked_prefill_size=8, enable_mixed_chunk=mixed, initial_new_token_ratio=0.0, min_new_token_ratio=0.0)
    wants = {}
    for _ in range(30):
        prompt = [chooser.randrange(2, 5) for _ in range(chooser.randrange(1, 30))]
        top = chooser.choice([None, 0, 2])
        wants[machine.submit(prompt, chooser.randrange(1, 24), prompt_logprobs=top)] = 0 if top is None else len(prompt) - 1
        for _ in range(chooser.randrange(3)):
            if machine.step():
                machine.check()
    machine.run()
    machine.check_answers()
    assert machine.scheduler.load().preemptions > 0
    for name, count in wants.items():
        assert machine.told[name].scores == [float(position) for position in range(count)], name
