"""LoRA adapters of a model over two ranks: their answers equal peft's, and an adapter that one rank cannot load is loaded on none."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.lora import TARGETS, save_adapter
from tests.models import FAMILIES, build_model, save_model
from tests.worker.exactness.harness import Engine, generate, make_prompts
from tests.worker.parallel.pair import MAX_LORA_RANK, Pair, Plenty

from fairlead_worker.ipc.messages import LoadAdapter, UnloadAdapter
from fairlead_worker.lora import adapters as adapters_module
from fairlead_worker.lora.adapters import PROFILE_ADAPTER, AdapterSet

PROMPTS = make_prompts()[1:10]
ATTENTION = TARGETS[:4]
MODELS: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "llama": ("llama", {}, TARGETS),
    "one KV head for both ranks, and biases": ("qwen2", {"num_key_value_heads": 1}, TARGETS),
    "qwen3 with its embedding for a head": ("qwen3", {"tie_word_embeddings": True}, TARGETS),
    "mixtral, with experts beside them": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}, ATTENTION),
}


def load(pair: Pair, number: int, folder: Path) -> str:
    """Why it was not loaded; empty where it was."""
    changed = pair.adapters.change(LoadAdapter(number, f"a{number}", f"file://{folder}", str(folder)))
    assert changed is not None and bool(changed.error) is (changed.info is None) is (number not in pair.adapters)
    return changed.error


def mixed(engine: Engine, want: Sequence[list[list[int]]], numbers: Sequence[int]) -> None:
    """Requests of several adapters and of none share the steps, and each is answered as it would be alone."""
    before = engine.mixed_steps
    chosen = [numbers[index % len(numbers)] for index in range(len(PROMPTS))]
    for shift in range(2):
        chosen = chosen[shift:] + chosen[:shift]
        assert engine.serve(PROMPTS, root=10 * shift, adapters=chosen) == [want[number][index] for index, number in enumerate(chosen)]
    assert engine.mixed_steps > before


@pytest.mark.parametrize(("family", "changes", "targets"), MODELS.values(), ids=MODELS)
def test_an_adapter_over_two_ranks_answers_as_pefts_merged_model(
    pair: Pair, tmp_path: Path, family: str, changes: dict[str, Any], targets: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if family not in FAMILIES:
        monkeypatch.setitem(FAMILIES, family, (family, FAMILIES["llama"][1]))
    want = [generate(save_model(family, tmp_path / "base", **changes), PROMPTS)]
    shapes: list[dict[str, Any]] = [{"targets": targets}, {"targets": ["q_proj", "o_proj"], "r": 5, "use_rslora": True}]
    folders = [tmp_path / f"a{number}" for number in (1, 2)]
    for seed, (folder, shape) in enumerate(zip(folders, shapes, strict=True)):
        want.append(generate(save_adapter(build_model(family, **changes), folder, seed, **shape), PROMPTS))
    assert want[0] != want[1] != want[2] != want[0], "the adapters change what is said"
    speculation = {"speculative_method": "ngram", "speculative_num_tokens": 3} if family == "llama" else {}
    with pair.engine(tmp_path / "base", chunk=64, settings=speculation) as engine:
        assert engine.serve(PROMPTS) == want[0]
        assert [load(pair, number, folder) for number, folder in enumerate(folders, 1)] == ["", ""]
        mixed(engine, want, (0, 1, 2))
        scored = engine.serve(PROMPTS[:3], root=30, adapters=[1, 2, 0], prompt_logprobs=2)
        assert scored == [want[number][index] for index, number in enumerate((1, 2, 0))]
        ((tokens, cached),) = engine.serve_counted(PROMPTS[-1:], adapters=[2])
        assert tokens == want[2][-1] and cached == (len(PROMPTS[-1]) - 1) // 16 * 16, "its own KV, and its own alone"
        # Another takes its place, on both ranks: its number is never used again.
        pair.adapters.change(UnloadAdapter(1))
        assert 1 not in pair.adapters and load(pair, 3, folders[0]) == ""
        mixed(engine, [want[0], [], want[2], want[1]], (3, 2, 0))


def changed(folder: Path, name: str, **tensors: torch.Tensor | None) -> Path:
    """The adapter in `folder` with other tensors, beside it."""
    made = Path(shutil.copytree(folder, folder.with_name(name)))
    held = load_file(made / "adapter_model.safetensors") | {f"base_model.model.{key}": value for key, value in tensors.items()}
    save_file({key: value for key, value in held.items() if value is not None}, made / "adapter_model.safetensors")
    return made


def huge(folder: Path) -> Path:
    """Numbers that are finite, and are not when multiplied: in what rank 1 has of a layer cut by its inputs, and nowhere else."""
    path = "model.layers.0.self_attn.o_proj.lora_{}.weight"
    held = load_file(folder / "adapter_model.safetensors")
    down, up = (held[f"base_model.model.{path.format(half)}"] for half in "AB")
    down[:, down.shape[1] // 2 :] = 1e38
    return changed(folder, "huge", **{path.format("A"): down, path.format("B"): up * 1e10})


def scaled(folder: Path) -> Path:
    made = changed(folder, "scaled")
    config = json.loads((made / "adapter_config.json").read_text())
    (made / "adapter_config.json").write_text(json.dumps(config | {"lora_alpha": 17}))
    return made


def gone(folder: Path) -> Path:
    made = changed(folder, "gone")
    (made / "adapter_model.safetensors").unlink()
    return made


def of_head(folder: Path) -> Path:
    return changed(folder, "of_head", **{f"lm_head.lora_{half}.weight": torch.zeros(8, 8) for half in "AB"})


def inside(folder: Path) -> Path:
    """On a module that is there because the model is divided."""
    pairs = {f"model.layers.0.self_attn.o_proj.layer.lora_{half}.weight": torch.zeros(8, 8) for half in "AB"}
    return changed(folder, "inside", **pairs)


def of_a_part(folder: Path) -> Path:
    """A matrix of the size of a rank's part, where the whole layer's is wanted."""
    path = "model.layers.0.self_attn.o_proj.lora_A.weight"
    held = load_file(folder / "adapter_model.safetensors")[f"base_model.model.{path}"]
    return changed(folder, "of_a_part", **{path: held[:, : held.shape[1] // 2].contiguous()})


def surrogate(folder: Path) -> Path:
    """An unknown setting, with half a surrogate pair for a name."""
    made = changed(folder, "surrogate")
    config = (made / "adapter_config.json").read_text()
    (made / "adapter_config.json").write_text(config.replace("{", '{"\\ud800": 1,', 1))
    return made


Change = Callable[[Path], Path]
BROKEN: dict[str, tuple[Change | None, Change | None, str]] = {
    "not there on rank 1": (None, gone, "rank 1 of 2: there is no adapter_model.safetensors in "),
    "not there on rank 0": (gone, None, "rank 0 of 2: there is no adapter_model.safetensors in "),
    "another on rank 1": (None, scaled, "rank 1 of 2 has read other files than rank 0: name a commit (@REVISION)"),
    "of the head": (of_head, of_head, "lm_head is the model's head"),
    "of a module that only ranks have": (inside, inside, "o_proj.layer is no linear layer of the model"),
    "as large as a part": (of_a_part, of_a_part, "o_proj maps 64 to 64 values, and the adapter's part 32 to 64"),
    "words that no message can hold": (surrogate, surrogate, "? is set (1)"),
    "no numbers, of rank 1's part": (huge, huge, "the model does not run with it: its logits are not finite"),
}


def test_what_a_rank_cannot_load_none_has_and_everything_goes_on(pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    want = [generate(save_model("llama", tmp_path / "base"), PROMPTS)]
    want.append(generate(save_adapter(build_model("llama"), tmp_path / "good", 5), PROMPTS))
    good = tmp_path / "good"
    with pair.engine(tmp_path / "base", chunk=64) as engine:
        assert load(pair, 1, good) == ""
        for number, (here, there, words) in enumerate(BROKEN.values(), 2):
            folder = here(good) if here else good
            # What is broken in the same way is one folder for both, as on a node.
            pair.elsewhere[number] = folder if here is there else there(good) if there else good
            error = load(pair, number, folder)
            assert words in error, error
            assert engine.serve(PROMPTS[:2], adapters=[1, 0]) == [want[1][0], want[0][1]]
            for made in {folder, pair.elsewhere[number]} - {good}:
                shutil.rmtree(made)
        with monkeypatch.context() as patched:  # in the midst of the trial, while the other rank waits for the sum
            patched.setattr(adapters_module._Adapted, "_add", raising)
            assert load(pair, 20, good) == "rank 0 of 2: the model does not run with it: out of cheese"
        mixed(engine, want, (1, 0))
        # Nothing is left of those on either rank: as many as may be loaded still can be.
        assert [load(pair, number, good) for number in (30, 31)] == ["", ""]
        error = load(pair, 32, good)
        assert error.startswith("3 adapters are loaded, and at most 3") and "rank" not in error, "on both ranks"
        mixed(engine, [*want, *([] for _ in range(28)), want[1], want[1]], (30, 0, 31, 1))
        pair.adapters.change(UnloadAdapter(30))
        assert load(pair, 33, good) == "", "what is unloaded is gone from both ranks"


def raising(*_: object) -> torch.Tensor:
    raise RuntimeError("out of cheese")


def test_the_largest_step_is_measured_with_an_adapter_of_each_ranks_size(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model("llama", tmp_path)
    seen: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}

    class Watched(Plenty):
        def peak_of(self, run: Callable[[], None]) -> int:
            over = AdapterSet.activate

            def watch(adapters: AdapterSet, numbers: Sequence[int], counts: Sequence[int]) -> Any:
                assert set(numbers) == {0, PROFILE_ADAPTER}
                for path, layer in adapters._layers.items():
                    delta = layer.deltas[PROFILE_ADAPTER]
                    seen[path] = (tuple(delta.down.weight.shape), tuple(delta.up.weight.shape))  # type: ignore[union-attr]  # torch: may be a module
                return over(adapters, numbers, counts)

            monkeypatch.setattr(AdapterSet, "activate", watch)
            return super().peak_of(run)

    memory = Watched(1 << 30)
    runner = pair.profiled(tmp_path, memory)
    rank = MAX_LORA_RANK
    sizes = {path.rpartition(".")[2]: shapes for path, shapes in seen.items()}
    # 64 wide, four heads and two KV heads of 16, 128 inside: a rank has half of each but of the width.
    assert sizes == {
        "q_proj": ((rank, 64), (32, rank)),
        "k_proj": ((rank, 64), (16, rank)),
        "v_proj": ((rank, 64), (16, rank)),
        "o_proj": ((rank, 32), (64, rank)),
        "gate_proj": ((rank, 64), (64, rank)),
        "up_proj": ((rank, 64), (64, rank)),
        "down_proj": ((rank, 64), (64, rank)),
    }
    assert len(seen) == 14 and runner.step_tokens
    assert not any(module._forward_hooks for module in runner.loaded.model.modules()), "what was imagined is gone"
