"""LoRA: an adapter's answers equal those of peft's merged model in transformers, token for token, in any batch."""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from tests.lora import adapter_of
from tests.models import save_model
from tests.worker.exactness.harness import Engine, generate, make_prompts

from fairlead_worker.errors import AdapterError
from fairlead_worker.lora.adapters import AdapterSet
from fairlead_worker.model.loader import LoadedModel, load_model
from fairlead_worker.native.library import native

PROMPTS = [prompt for prompt in make_prompts() if 2 < len(prompt) <= 333]
SHAPES: dict[str, list[dict[str, object]]] = {
    "llama": [{"r": 8, "lora_alpha": 16}, {"r": 5, "lora_alpha": 4, "use_rslora": True}, {"targets": ["q_proj", "down_proj"], "r": 33}],
    "qwen2": [{}, {"rank_pattern": {"q_proj": 3}, "alpha_pattern": {"layers.1.mlp.up_proj": 40}}, {"targets": ["v_proj"]}],
    "gemma3": [{}, {"targets": ["gate_proj"]}, {"targets": ["o_proj", "k_proj"], "use_rslora": True}],
    "gpt2": [
        {"targets": ["c_attn", "c_fc"], "fan_in_fan_out": True},
        {"targets": ["c_proj"], "fan_in_fan_out": True},
        {"targets": "all-linear"},
    ],
    "gpt_neox": [{"targets": ["query_key_value"]}, {"targets": ["dense", "dense_h_to_4h"]}, {"targets": "all-linear"}],
    "opt": [{"targets": ["q_proj", "fc1"]}, {"targets": ["out_proj", "fc2"]}, {"targets": "all-linear"}],
}


@dataclass
class World:
    """A model with three adapters, and what transformers answers with each: `want[0]` is the model's own."""

    loaded: LoadedModel
    want: list[list[list[int]]]
    folders: list[Path]

    def engine(self, chunk: int = 64, **settings: object) -> Engine:
        adapters = AdapterSet(self.loaded, 3, 64)
        for number, folder in enumerate(self.folders, 1):
            adapters.load(number, f"a{number}", f"file://{folder}", folder)
        return Engine(self.loaded, chunk, adapters=adapters, **settings)  # type: ignore[arg-type]  # fields of Engine

    def expected(self, numbers: Sequence[int]) -> list[list[int]]:
        return [self.want[number][index] for index, number in enumerate(numbers)]


@pytest.fixture(scope="module")
def world_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], World]:
    made: dict[str, World] = {}

    def world(family: str) -> World:
        if family not in made:
            folder = tmp_path_factory.mktemp(family)
            want = [generate(save_model(family, folder / "base"), PROMPTS)]
            folders = [folder / f"a{number}" for number in (1, 2, 3)]
            for seed, (path, shape) in enumerate(zip(folders, SHAPES[family], strict=True)):
                want.append(generate(adapter_of(family, path, seed, **shape), PROMPTS))
            made[family] = World(load_model(f"file://{folder / 'base'}"), want, folders)
        return made[family]

    return world


def numbers_of(prompts: Sequence[list[int]]) -> list[int]:
    return [index % 4 for index in range(len(prompts))]


@pytest.mark.parametrize("family", SHAPES)
def test_mixed_with_others_an_adapter_answers_as_pefts_merged_model(family: str, world_of: Callable[[str], World]) -> None:
    world = world_of(family)
    assert all(world.want[0] != other for other in world.want[1:]), "the adapters change what is said"
    engine = world.engine()
    for shift in (0, 1):  # three adapters and none, side by side in the steps
        numbers = [(number + shift) % 4 for number in numbers_of(PROMPTS)]
        assert engine.serve(PROMPTS, adapters=numbers) == world.expected(numbers)
    assert engine.mixed_steps > 0


@pytest.mark.parametrize("native_decoder", [True, False], ids=["native", "layers"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_alone_and_in_company_the_bits_are_the_same(dtype: str, native_decoder: bool, world_of: Callable[[str], World]) -> None:
    world = world_of("llama")
    world = replace(world, loaded=load_model(world.loaded.path.as_uri(), dtype=dtype))
    # torch's attention gives a query the same bits in any company only where it is asked to.
    settings = {"native_decoder": native_decoder, "deterministic": native() is None}
    engine = world.engine(**settings)
    prompts = PROMPTS[:8]
    numbers = numbers_of(prompts)
    together = told(engine, prompts, numbers)
    alone = [told(world.engine(**settings), [prompt], [number])[0] for prompt, number in zip(prompts, numbers, strict=True)]
    assert together == alone


@pytest.mark.parametrize(
    "settings",
    [
        {"chunk": 16},
        {"chunk": 0},
        {"settings": {"speculative_method": "ngram", "speculative_num_tokens": 3, "speculative_ngram_min": 1}},
        {"pages": 40, "settings": {"initial_new_token_ratio": 0.0, "min_new_token_ratio": 0.0}},
        {"native_decoder": False},
    ],
    ids=["small chunks", "whole prompts", "speculation", "retraction", "layer by layer"],
)
def test_the_answers_hold_in_every_way_of_computing_them(settings: dict[str, object], world_of: Callable[[str], World]) -> None:
    world = world_of("qwen2")
    engine = world.engine(**settings)
    numbers = numbers_of(PROMPTS)
    assert engine.serve(PROMPTS, adapters=numbers) == world.expected(numbers)
    load = engine.scheduler.load()
    assert load.preemptions or "pages" not in settings
    assert "settings" not in settings or "pages" in settings or (load.drafts is not None and load.drafts.rounds)


def test_a_draft_model_guesses_for_adapters_too(world_of: Callable[[str], World]) -> None:
    world = world_of("llama")
    engine = world.engine(draft=world.loaded, settings={"speculative_method": "draft"})
    numbers = numbers_of(PROMPTS)
    assert engine.serve(PROMPTS, adapters=numbers) == world.expected(numbers)


def test_what_one_adapter_cached_is_there_for_it_and_for_nobody_else(world_of: Callable[[str], World]) -> None:
    world = world_of("qwen2")
    engine = world.engine()
    longest = [max(range(len(PROMPTS)), key=lambda index: len(PROMPTS[index]))]
    prompts = [PROMPTS[longest[0]]]
    for number in (1, 0, 2):
        for cached in (False, True):
            ((tokens, hit),) = engine.serve_counted(prompts, adapters=[number])
            assert tokens == world.want[number][longest[0]] and bool(hit) is cached


def test_prompt_logprobs_are_the_adapters_own(world_of: Callable[[str], World]) -> None:
    """Scored in one step with others: what each is told is what it is told alone."""
    world = world_of("llama")
    prompts, numbers = PROMPTS[4:8], [0, 1, 2, 0]
    together = scores(world.engine(), prompts, numbers)
    assert together == [scores(world.engine(), [prompt], [number])[0] for prompt, number in zip(prompts, numbers, strict=True)]
    assert together[1] != scores(world.engine(), prompts, [0, 0, 2, 0])[1]


def test_an_unloaded_adapter_leaves_nothing_behind(world_of: Callable[[str], World]) -> None:
    world = world_of("llama")
    hooks = sum(len(module._forward_hooks) for module in world.loaded.model.modules())
    adapters = AdapterSet(world.loaded, 3, 64)
    for number in (1, 2):
        adapters.load(number, "a", "file:///a", world.folders[number - 1])
    adapters.unload(1)
    engine = Engine(world.loaded, 64, adapters=adapters)
    numbers = [2 * (index % 2) for index in range(len(PROMPTS))]
    assert engine.serve(PROMPTS, adapters=numbers) == world.expected(numbers)
    adapters.unload(2)
    assert sum(len(module._forward_hooks) for module in world.loaded.model.modules()) == hooks


def test_a_rank_beyond_the_bound_is_refused(world_of: Callable[[str], World]) -> None:
    world = world_of("llama")
    adapters = AdapterSet(world.loaded, 3, 32)
    adapters.load(1, "low", "file:///low", world.folders[0])
    with pytest.raises(AdapterError, match=r"rank is 33.*--max-lora-rank"):
        adapters.load(2, "high", "file:///high", world.folders[2])
    assert list(adapters.infos) == [1]


def told(engine: Engine, prompts: Sequence[list[int]], numbers: Sequence[int]) -> list[list[object]]:
    """Tokens and log-probabilities of each prompt, to the last bit."""
    answers = engine.outputs(prompts, adapters=numbers, logprobs=3)
    return [[(array("I", output.tokens).tolist(), output.logprobs) for output in outputs] for outputs in answers]


def scores(engine: Engine, prompts: Sequence[list[int]], numbers: Sequence[int]) -> list[list[object]]:
    """Log-probabilities of the prompts' own tokens."""
    return [
        [score for output in outputs for score in output.prompt_logprobs]
        for outputs in engine.outputs(prompts, adapters=numbers, prompt_logprobs=2)
    ]
