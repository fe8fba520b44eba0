"""Prompts whose hidden states are wanted, among others and short of pages: each position once, and every invariant after every step."""

from tests.worker.scheduler.engine_model import EngineModel


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
