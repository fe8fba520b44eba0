"""Embeddings equal transformers' hidden states, pooled and normalised, in float32: alone, batched, chunked, cached, beside generation."""

from array import array
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.lora import adapter_of
from tests.models import save_model
from tests.worker.exactness.harness import Engine, generate, make_prompts
from torch.nn.functional import normalize
from transformers import PreTrainedModel

from fairlead_worker.ipc.messages import PoolingKind, Sampling, Submit
from fairlead_worker.lora.adapters import AdapterSet
from fairlead_worker.model.loader import LoadedModel, load_model

PROMPTS = [prompt for prompt in make_prompts() if len(prompt) <= 333]
KINDS: tuple[PoolingKind | None, ...] = ("last", "mean", None)


@dataclass
class Case:
    loaded: LoadedModel
    states: list[torch.Tensor]
    """Of each prompt: [tokens, hidden]."""
    tokens: list[list[int]]

    def check(self, engine: Engine, kinds: list[PoolingKind | None]) -> list[int]:
        """All prompts at once, each as its kind says; returns each one's cached tokens."""
        cached = []
        for outputs, kind, states, tokens in zip(engine.outputs(PROMPTS, pooling=kinds), kinds, self.states, self.tokens, strict=True):
            if kind is None:
                assert array("I", b"".join(output.tokens for output in outputs)).tolist() == tokens
            else:
                (output,) = outputs
                close(output.embedding, states, kind)
            cached.append(outputs[-1].cached_tokens)
        return cached


def close(embedding: bytes, states: torch.Tensor, kind: PoolingKind) -> None:
    want = normalize(states[-1] if kind == "last" else states.mean(0), dim=0)
    torch.testing.assert_close(torch.from_numpy(np.frombuffer(embedding, np.float32).copy()), want, atol=1e-5, rtol=0)


def states_of(model: PreTrainedModel) -> list[torch.Tensor]:
    with torch.no_grad():
        return [model.base_model(torch.tensor([prompt])).last_hidden_state[0] for prompt in PROMPTS]


@pytest.fixture(scope="module", params=["llama", "gemma2", "gpt2"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp(request.param)
    model = save_model(request.param, folder)
    return Case(load_model(str(folder)), states_of(model), generate(model, PROMPTS))


@pytest.mark.parametrize("kind", ["last", "mean"])
def test_alone_and_together(case: Case, kind: PoolingKind) -> None:
    engine = Engine(case.loaded, chunk=0)
    for place, (prompt, states) in enumerate(zip(PROMPTS, case.states, strict=True)):
        ((output,),) = engine.outputs([prompt], root=place, pooling=[kind])
        close(output.embedding, states, kind)
    case.check(engine, [kind] * len(PROMPTS))
    assert engine.scheduler.load().running == 0 and engine.scheduler.load().pages_free == engine.pages


@pytest.mark.parametrize(
    "settings",
    [{"chunk": 64}, {"chunk": 16}, {"chunk": 64, "native_decoder": False}, {"chunk": 64, "backend": "reference"}],
    ids=str,
)
def test_chunked_cached_and_beside_generation(case: Case, settings: dict) -> None:
    engine = Engine(case.loaded, **settings)
    for turn in range(3):
        kinds = list(islice(cycle(KINDS[turn:] + KINDS[:turn]), len(PROMPTS)))
        cached = case.check(engine, kinds)
        assert all(found == 0 for found, kind in zip(cached, kinds, strict=True) if kind == "mean"), "cached positions have no states"
        if turn:
            assert sum(found for found, kind in zip(cached, kinds, strict=True) if kind == "last") > 100
    assert engine.mixed_steps > 10


def test_preempted_in_the_middle_of_its_prompt_it_goes_on_where_it_was(case: Case) -> None:
    """With room for one: what was summed stays summed, and is not summed again."""
    engine = Engine(case.loaded, chunk=16, pages=21, settings={"policy": "lpm"})
    long, states = PROMPTS[-1], case.states[-1]
    engine.scheduler.submit(Submit("low", array("I", long).tobytes(), Sampling(1), 0, priority=9, pooling="mean"))
    outputs = []
    for step in range(1000):
        if step == 7:
            urgent = Submit("high", array("I", PROMPTS[8]).tobytes(), Sampling(4, temperature=0), 1, priority=0)
            assert engine.scheduler.submit(urgent) is None
        if not (plan := engine.scheduler.plan()):
            break
        outputs += engine.scheduler.advance(plan, engine.runner.execute(plan))
    assert engine.scheduler.load().preemptions == 1
    (embedding,) = [output.embedding for output in outputs if output.id == "low"]
    close(embedding, states, "mean")


def test_prompts_are_scored_in_the_same_steps(case: Case) -> None:
    engine = Engine(case.loaded, chunk=0)
    for name, prompt, pooling in (("a", PROMPTS[6], None), ("b", PROMPTS[7], "mean"), ("c", PROMPTS[9], "last")):
        sampling = Sampling(1, temperature=0, prompt_logprobs=1)
        assert engine.scheduler.submit(Submit(name, array("I", prompt).tobytes(), sampling, 0, pooling=pooling)) is None
    plan = engine.scheduler.plan()
    assert plan.scores == 1 and plan.pools == 2 and plan.samples == 1
    scored, mean, last = sorted(engine.scheduler.advance(plan, engine.runner.execute(plan)), key=lambda output: output.id)
    assert len(scored.prompt_logprobs) == len(PROMPTS[6]) - 1
    close(mean.embedding, case.states[7], "mean")
    close(last.embedding, case.states[9], "last")


def test_with_adapters(tmp_path: Path) -> None:
    save_model("llama", tmp_path / "base")
    merged = adapter_of("llama", tmp_path / "a", 0, r=8, lora_alpha=16)
    loaded = load_model(str(tmp_path / "base"))
    adapters = AdapterSet(loaded, 1, 64)
    adapters.load(1, "a", "file:///a", tmp_path / "a")
    plain, adapted = states_of(save_model("llama", tmp_path / "again")), states_of(merged)
    engine = Engine(loaded, chunk=64, adapters=adapters)
    numbers = [index % 2 for index in range(len(PROMPTS))]
    kinds: list[PoolingKind | None] = [("last", "mean")[index // 2 % 2] for index in range(len(PROMPTS))]
    for index, (output,) in enumerate(engine.outputs(PROMPTS, adapters=numbers, pooling=kinds)):
        close(output.embedding, (adapted if numbers[index] else plain)[index], kinds[index] or "last")


def test_bfloat16_is_summed_in_float32(tmp_path: Path) -> None:
    model = save_model("llama", tmp_path)
    engine = Engine(load_model(str(tmp_path), dtype="bfloat16"), chunk=16)
    ((output,),) = engine.outputs([PROMPTS[-1]], pooling=["mean"])
    got = torch.from_numpy(np.frombuffer(output.embedding, np.float32).copy())
    assert got @ normalize(states_of(model)[-1].mean(0), dim=0) > 0.995
    assert abs(got.norm().item() - 1) < 1e-6
