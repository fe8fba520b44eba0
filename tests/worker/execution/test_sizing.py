"""Budgets for given speed and free bytes: the size of chunks and of KV, and the handling of steps that do not fit."""

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.models import VOCABULARY, save_model

from fairlead_worker.execution.draft import CATCH_UP
from fairlead_worker.execution.memory_profile import largest_plan, run_largest_step
from fairlead_worker.execution.runner_builder import RunnerBuilder
from fairlead_worker.execution.sizing import LEAST_SPARE, SPARE, choose_chunk, largest_chunk, profile_memory
from fairlead_worker.model.loader import load_model
from fairlead_worker.sampling import draw as draw_module
from fairlead_worker.scheduler.config import SchedulerConfig
from fairlead_worker.scheduler.limits import StepLimits

GIB = 1 << 30


@dataclass
class Given:
    """A device of which weights and others hold `used` bytes, and a step `per_token` for each of its tokens and `fixed` besides."""

    total: int
    used: int
    per_token: int
    fixed: int = 0
    running: int = 0
    tried: list[int] = field(default_factory=list)

    def free(self) -> int:
        return self.total - self.used

    def peak_of(self, run: Callable[[], None]) -> int:
        run()
        taken = self.fixed + self.per_token * self.running
        if taken > self.free():
            raise torch.OutOfMemoryError("CUDA out of memory")
        return taken

    def attempt(self, tokens: int) -> None:
        self.running = tokens
        self.tried.append(tokens)


def test_an_h200_with_an_8b_model() -> None:
    device = Given(140 * GIB, 17 * GIB, 2 << 20, GIB)
    room = profile_memory(device, 0.92, 768, 32, device.attempt)
    assert room.step_tokens == 768 and device.tried == [768]
    assert room.kv_bytes == device.free() - int(140 * GIB * (1 - 0.92)), "the fraction binds"
    tight = profile_memory(device, 1.0, 768, 32, device.attempt)
    assert tight.kv_bytes == device.free() - tight.step_bytes - int(140 * GIB * SPARE), "the step binds"


def test_a_step_that_does_not_fit_is_made_smaller_and_said(caplog: pytest.LogCaptureFixture) -> None:
    device = Given(24 * GIB, 20 * GIB, 4 << 20)
    room = profile_memory(device, 0.9, 8192, 32, device.attempt)
    assert device.tried == [8192, 4096, 2048, 1024] and room.step_tokens == 1024
    assert room.kv_bytes == 0, "it takes all that is left"
    assert "a step of 8192 tokens does not fit into memory: steps are kept to 1024" in caplog.text


def test_the_step_that_most_keep_to_is_tried_before_halves() -> None:
    device = Given(24 * GIB, 20 * GIB, 4 << 20)
    room = profile_memory(device, 0.9, 2816, 32, device.attempt, usual=768)
    assert device.tried == [2816, 768] and room.step_tokens == 768
    device.tried.clear()
    assert profile_memory(device, 0.9, 1100, 32, device.attempt, usual=1050).step_tokens == 525
    assert device.tried == [1100, 1050, 525]


def test_where_nothing_fits_it_says_what_to_do() -> None:
    device = Given(24 * GIB, 23 * GIB, 0, 2 * GIB)
    with pytest.raises(
        MemoryError, match=r"a step of 32 tokens does not fit beside the weights: 1.00 GiB of 24.00 GiB are free; lower --max"
    ):
        profile_memory(device, 0.9, 1000, 32, device.attempt)
    assert device.tried[-1] == 32


@given(st.integers(4 * GIB, 200 * GIB), st.floats(0.05, 0.9), st.integers(0, 8 << 20), st.floats(0.3, 1.0), st.integers(64, 20_000))
def test_kv_and_the_largest_step_always_fit(total: int, used: float, per_token: int, fraction: float, tokens: int) -> None:
    device = Given(total, int(total * used), per_token)
    try:
        room = profile_memory(device, fraction, tokens, 32, device.attempt)
    except MemoryError:
        assert per_token * 32 > device.free()
        return
    assert room.step_tokens <= tokens and room.kv_bytes >= 0
    assert room.kv_bytes == 0 or device.used + room.kv_bytes + per_token * room.step_tokens + LEAST_SPARE <= total
    assert room.kv_bytes == 0 or device.used + room.kv_bytes <= total * fraction + 1


@pytest.mark.parametrize(
    ("fixed", "per_token", "limit", "most", "chunk"),
    [
        (0.0, 3e-5, 0.5, 8192, 512),
        (10e-3, 3e-6, 0.5, 8192, 8192),
        (10e-3, 3e-6, 0.02, 8192, 2048),
        (10e-3, 3e-6, 0.5, 3000, 2048),
        (30e-3, 1e-4, 0.5, 8192, 1024),
        (5.0, 1e-4, 0.5, 8192, 512),
    ],
    ids=["busy with few tokens", "idle with few tokens", "a target", "little memory", "in between", "slow"],
)
def test_a_chunk_is_as_large_as_makes_the_device_faster(fixed: float, per_token: float, limit: float, most: int, chunk: int) -> None:
    """A step takes `fixed` seconds, for reading weights and launches, and `per_token` for each token."""
    tried = list[int]()

    def seconds_of(tokens: int) -> float:
        tried.append(tokens)
        return fixed + per_token * tokens

    assert choose_chunk(seconds_of, limit, most) == chunk
    assert max(tried) <= min(2 * chunk, most), "no step of a size that cannot be chosen"


@given(st.integers(0, 1 << 40), st.integers(0, 1 << 40), st.integers(1, 1 << 20))
def test_a_chunk_has_room(step_bytes: int, free: int, most: int) -> None:
    chunk = largest_chunk(step_bytes, free, most)
    assert chunk == 512 or (chunk <= most and chunk // 512 * step_bytes <= free / 16)
    assert 2 * chunk > most or 2 * chunk // 512 * step_bytes > free / 16, "no larger one has"


def test_the_chunk_is_measured_before_the_largest_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step takes 0.1 s here, so the chunk grows to the prompt tokens of a step. Then the largest step has it beside the decodes."""
    save_model("llama", tmp_path)
    clock = itertools.count()
    monkeypatch.setattr(time, "perf_counter", lambda: 0.1 * next(clock))
    loaded = load_model(str(tmp_path))

    def chunk_and_step(limit: float, memory: Given) -> tuple[int, int]:
        steps = SchedulerConfig(300, max_num_seqs=5, max_prefill_tokens=2048, idle_prefill_chunks=5)
        builder = RunnerBuilder(loaded=loaded, page_size=16, backend="reference", steps=steps, chunk_seconds=limit, memory=memory)
        runner = builder.build()
        return runner.chunk_tokens, runner.step_tokens

    assert chunk_and_step(0.5, Given(2 * GIB, 0, 0)) == (2048, 2048 + 5)
    assert chunk_and_step(0.05, Given(2 * GIB, 0, 0)) == (512, 2048 + 5)
    assert chunk_and_step(0.5, Given(2 * GIB, 0, 0, fixed=GIB // 16)) == (1024, 2048 + 5), "twice these bytes are a sixteenth"
    assert chunk_and_step(0.0, Given(2 * GIB, 0, 0)) == (0, 2048 + 5), "not measured"


def test_the_worst_plan_is_as_large_as_its_limits() -> None:
    limits = StepLimits(prefill=500, decode=20, context=200)
    plan = largest_plan(limits, 16)
    assert sum(row.count for row in plan.rows) == limits.tokens and [row.count for row in plan.rows[20:]] == [200, 200, 100]
    assert all(row.end == 200 and row.samples and set(row.pages) == {0} for row in plan.rows)


@pytest.mark.parametrize("peak", [0.0, 20.0], ids=["flat", "peaked"])
def test_its_tokens_are_chosen_by_a_full_sort_whatever_the_logits_are(peak: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a model whose logits on the profile's text are peaked would leave no memory for it."""
    rows = list[int]()
    keep_sorted = draw_module.keep_sorted
    monkeypatch.setattr(draw_module, "keep_sorted", lambda scaled, *rest: rows.append(len(scaled)) or keep_sorted(scaled, *rest))
    logits = torch.zeros(3, 2000)
    logits[:, 7] = peak
    run_largest_step(StepLimits(prefill=8, decode=2, context=16), 16, lambda _: logits)
    assert rows == [3]


def test_it_runs_on_one_page_of_a_real_model(tmp_path: Path) -> None:
    """The whole way: packing, the model's layers, penalties, filters, log-probabilities."""
    save_model("llama", tmp_path)
    loaded = load_model(str(tmp_path))
    config = SchedulerConfig(max_model_len=300, max_num_seqs=5, chunked_prefill_size=64)
    runner = RunnerBuilder(loaded=loaded, page_size=16, kv_pages=1, backend="reference").build()
    seen = []

    def logits_of(plan) -> torch.Tensor:
        seen.append(runner.logits(plan))
        return seen[0]

    run_largest_step(StepLimits.from_config(config, 16), 16, logits_of)
    assert seen[0].shape == (6, VOCABULARY)


def test_the_profile_includes_the_largest_pass_of_a_draft_model(tmp_path: Path) -> None:
    """The model drafts for requests that are `CATCH_UP` tokens behind, beside the prompts of the step."""
    save_model("llama", tmp_path)
    loaded, draft = load_model(str(tmp_path)), load_model(str(tmp_path))
    passes: dict[str, list[int]] = {"model": [], "draft": []}
    for name, model in (("model", loaded.model), ("draft", draft.model)):
        model.get_input_embeddings().register_forward_pre_hook(lambda _, inputs, name=name: passes[name].append(inputs[0].shape[-1]))
    steps = SchedulerConfig(300, max_num_seqs=5, chunked_prefill_size=64, speculative_method="draft", speculative_num_tokens=3)

    class Memory(Given):
        def peak_of(self, run: Callable[[], None]) -> int:
            for each in passes.values():
                each.clear()
            run()
            largest = {name: max(counts, default=0) for name, counts in passes.items()}
            assert largest == {"model": 64 + 5 * (1 + 3), "draft": 64 + 5 + CATCH_UP}
            return GIB

    made = RunnerBuilder(loaded=loaded, page_size=16, backend="reference", draft=draft, steps=steps, memory=Memory(2 * GIB, 0, 0)).build()
    assert made.step_tokens == 64 + 5 * (1 + 3)
