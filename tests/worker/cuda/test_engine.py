"""The engine on the modelled device, with an ordinary batch."""

from tests.worker.cuda.engine import PROMPTS, device_engine, expected_answers


def test_a_batch_uses_graphs_and_the_host_tier_without_a_fault(expected: list[list[int]]) -> None:
    with device_engine() as (engine, mode):
        assert engine.runner.graphs is not None and engine.runner.graphs.is_recorded
        for _ in range(2):
            for prompt in range(len(PROMPTS)):
                engine.submit(prompt)
            engine.finish()
        answers = engine.answers()
        assert answers == {name: expected[prompt] for name, prompt in engine.prompts.items()}
        assert mode.machine.faults == []
        load = engine.scheduler.load().host
        assert load is not None and load.loaded and load.saved and mode.machine.replays
        assert set(mode.machine.waits) == {"event synchronize", "synchronize"}, "the second while graphs are recorded"


def test_float8_kv_uses_graphs_and_the_host_tier_without_a_fault() -> None:
    scales = (0.25, 1.0)
    expected = expected_answers(scales)
    with device_engine(scales=scales) as (engine, mode):
        for _ in range(2):
            for prompt in range(len(PROMPTS)):
                engine.submit(prompt)
            engine.finish()
        assert engine.answers() == {name: expected[prompt] for name, prompt in engine.prompts.items()}
        assert mode.machine.faults == []
        load = engine.scheduler.load().host
        assert load is not None and load.loaded and load.saved and mode.machine.replays


def test_the_host_tier_is_unpinned_after_its_copies(expected: list[list[int]]) -> None:
    with device_engine(graphs=False) as (engine, mode):
        for _ in range(2):
            for prompt in (5, 4, 1, 5):
                engine.submit(prompt)
            engine.finish()
        registered = [block for block, _ in mode.host_blocks.values() if block.kind == "registered"]
        assert registered and registered[0].history.writes
        engine.runner.host = None
        assert mode.machine.faults == []
        assert not any(block.kind == "registered" for block, _ in mode.host_blocks.values())
