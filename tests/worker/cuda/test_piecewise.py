"""Piecewise graphs on the modelled device: they are in order, planted faults are found, and failed recordings fall back."""

from collections.abc import Iterator

import pytest
from tests.worker.cuda import planted_pieces as planted
from tests.worker.cuda.engine import PIECES, PROMPTS, Engine, capture_pieces, device_engine, expected_answers
from tests.worker.cuda.machine import Failure
from tests.worker.cuda.planted import Patch, Plant
from tests.worker.cuda.test_capture import DRIVER, KINDS

FAULTS: dict[Plant, str] = {
    planted.queries_in_the_pool: "attention uses memory that was freed",
    planted.attention_on_another_stream: "a replay is not ordered after attention",
}
WRONG = [planted.fresh_output, planted.padding_on_the_first_page]
"""Faults that no stream's speed explains: the tokens are others."""


def serve(engine: Engine) -> dict[str, list[int]]:
    """Serve all prompts twice, in chunks beside decodes, with prefixes that move to the host and back."""
    for _ in range(2):
        for prompt in range(len(PROMPTS)):
            engine.submit(prompt)
        engine.finish()
    return engine.answers()


@pytest.mark.parametrize("scales", [None, (0.25, 1.0)], ids=["float16", "float8 KV"])
def test_chunks_and_mixed_steps_are_replayed_without_a_fault(scales: tuple[float, ...] | None) -> None:
    expected = expected_answers(scales)
    with device_engine(pieces=True, scales=scales) as (engine, mode):
        pieces, machine, steps = engine.runner.pieces, mode.machine, list[tuple[int, bool]]()
        assert pieces is not None and pieces.sizes == [4, 6, 8]
        run, pageable = pieces.run, mode.pageable

        def counted(step):  # type: ignore[no-untyped-def]  # PackedStep -> logits
            logits = run(step)
            steps.append((len(step.tokens), logits is not None))
            return logits

        pieces.run = counted  # type: ignore[method-assign]  # counts
        assert serve(engine) == {name: expected[prompt] for name, prompt in engine.prompts.items()}
        assert machine.faults == [] and mode.pageable == pageable
        sizes = {tokens for tokens, replayed in steps if replayed}
        assert sizes & {*PIECES} and sizes - {*PIECES}, "full and padded"
        assert set(machine.waits) == {"event synchronize", "synchronize"}, "the second while graphs are recorded"


@pytest.mark.parametrize("plant", FAULTS, ids=lambda plant: plant.__name__)
def test_a_planted_fault_is_found(plant: Plant, monkeypatch: Patch) -> None:
    plant(monkeypatch)
    with device_engine(pieces=True) as (engine, mode):
        assert engine.runner.pieces is not None
        serve(engine)
        assert any(FAULTS[plant] in fault for fault in mode.machine.faults), set(mode.machine.faults)


@pytest.mark.parametrize("plant", WRONG, ids=lambda plant: plant.__name__)
def test_a_planted_fault_changes_tokens(plant: Plant, monkeypatch: Patch, expected: list[list[int]]) -> None:
    """So the start-up trial, which compares numbers, turns the pieces off."""
    plant(monkeypatch)
    with device_engine(pieces=True, host_tier=False) as (engine, _):
        assert engine.runner.pieces is not None
        assert serve(engine) != {name: expected[prompt] for name, prompt in engine.prompts.items()}


def failures(operations: list[str], is_old: bool) -> Iterator[Failure]:
    """Yield a failure of each operation, once in the warm-up and once in a capture; on a new torch of those that end a capture."""
    for place, name in enumerate(dict.fromkeys(operations)):
        last = len(operations) - 1 - operations[::-1].index(name)
        for at in {operations.index(name), last} if is_old else {last} & {last if name in DRIVER else -1}:
            yield Failure(at, *KINDS[place % len(KINDS)])


@pytest.mark.parametrize("is_old", [False, True], ids=["new torch", "old torch"])
def test_a_failure_of_any_operation_of_a_recording_falls_back(is_old: bool, expected: list[list[int]]) -> None:
    """The graphs for decodes stay, the pool can be used again, and chunks run as plain steps."""
    with device_engine(host_tier=False, is_old=is_old) as (engine, mode):
        machine, runner = mode.machine, engine.runner
        sizes, every = capture_pieces(runner, machine, chosen=[8])
        assert not sizes.failure and {*DRIVER, "attention", "append"} <= set(every)
        for failure in failures(every, is_old):
            sizes, _ = capture_pieces(runner, machine, failure, [8])
            where = f"{every[failure.at]}, {failure}"
            assert runner.pieces is None and sizes.failure.startswith("steps with prompts cannot be recorded: "), where
            assert machine.current is machine.default and not machine.captures and not machine.recording, where
            machine.empty_cache()
        assert runner.graphs is not None and runner.graphs.is_recorded
        machine.replays = 0
        engine.submit(2)
        engine.finish()
        assert engine.answers()["0"] == expected[2] and machine.replays and not machine.faults, machine.faults
        sizes, _ = capture_pieces(runner, machine, chosen=[8])
        assert not sizes.failure and runner.pieces is not None
        engine.submit(5)
        engine.finish()
        assert engine.answers()["1"] == expected[5] and not machine.faults, machine.faults
