"""The engine on the modelled device, with an ordinary batch."""

from dataclasses import replace

import pytest
import torch
from bench.gpu import interpreter
from bench.gpu.batches import packed
from tests.worker.cuda.engine import CONTEXT, PAGE, PROMPTS, device_engine, expected_answers, make_runner
from tests.worker.cuda.tensors import CUDA

from fairlead_worker.execution.cuda_graphs.decodes import graphs_for


@pytest.mark.parametrize("scales", [None, (0.25, 1.0)], ids=["float16", "float8 KV"])
def test_a_batch_uses_graphs_and_the_host_tier_without_a_fault(scales: tuple[float, ...] | None) -> None:
    expected = expected_answers(scales)
    with device_engine(scales=scales) as (engine, mode):
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


@torch.inference_mode()
def test_graphs_of_drafted_tokens_reuse_their_buffers_without_a_fault() -> None:
    """Divisions of the same tokens into requests take turns, so that a replay would read the rows of another one."""
    plain = make_runner(torch.device("cpu"), interpreter, lambda weights: weights)
    with device_engine(graphs=False, host_tier=False) as (engine, mode):
        runner = engine.runner
        runner.graphs = graphs_for(runner.forward, runner.backend, 4, CONTEXT, verifies=True)
        assert runner.graphs is not None
        runner.graphs.capture()
        for divided in ([3, 1], [1, 3], [2, 2], [4], [1, 2], [1, 1]):
            rows = [(5 + place, 1) for tokens in divided for place in range(tokens)]
            tables = [[3 * request, 3 * request + 1, 3 * request + 2] for request, tokens in enumerate(divided) for _ in range(tokens)]
            steps = (packed(rows, tables, PAGE, device) for device in (torch.device("cpu"), CUDA))
            cpu, gpu = (replace(step, sampling=torch.arange(len(rows), device=step.tokens.device)) for step in steps)
            torch.testing.assert_close(runner.run(gpu).cpu(), plain.run(cpu), rtol=0, atol=0.02)
        assert mode.machine.replays == 6 and mode.machine.faults == []


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
