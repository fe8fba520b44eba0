"""Draft chains on the modelled device: every token is written before the next pass and the host read it."""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from bench.gpu import interpreter
from tests.worker.cuda import planted
from tests.worker.cuda.engine import CONTEXT, GRAPH_ROWS, PROMPTS, SAMPLING, VOCABULARY, capture, make_runner
from tests.worker.cuda.library import make_library
from tests.worker.cuda.machine import Machine
from tests.worker.cuda.tensors import CUDA
from tests.worker.cuda.torch_cuda import modelled_device
from tests.worker.execution.planner import make_request
from tests.worker.execution.test_draft import Asking
from tests.worker.sampling.test_verify import run as serve

from fairlead_worker.execution.cuda_graphs.decodes import graphs_for
from fairlead_worker.execution.draft import Drafter
from fairlead_worker.ipc.messages import Sampling
from fairlead_worker.kernels import workspace

CHOSEN = (0, 1, 4)
"""Prompts: greedy, drawn with top_p, and with penalties, which count the drafted tokens on the host."""


def generate(device: torch.device, library: Any, place: Callable[[torch.Tensor], torch.Tensor], machine: Machine | None) -> Any:
    """Serve with a model that drafts for itself. Return the tokens, and how many were drafted."""
    runner, drafting = (make_runner(device, library, place, 24) for _ in range(2))
    drafter = runner.drafter = Drafter(drafting.forward, drafting.loaded, drafting.backend, VOCABULARY)
    if machine is not None:
        capture(runner, machine)
        drafter.graphs = graphs_for(drafting.forward, drafting.backend, GRAPH_ROWS, CONTEXT)
        assert drafter.graphs is not None
        drafter.graphs.capture()
    requests = [
        make_request(str(number), PROMPTS[prompt], Sampling(**{"max_tokens": 8, "temperature": 0.0} | SAMPLING.get(prompt, {})), number)
        for number, prompt in enumerate(CHOSEN)
    ]
    planner = Asking(requests, 24, 4, 1 << 30)
    drafted = 0
    execute = runner.execute

    def count(plan: Any) -> Any:
        nonlocal drafted
        result = execute(plan)
        drafted += result.executed.drafted
        return result

    with patch.object(runner, "execute", count):
        return serve(runner, planner)[0], drafted


def faults() -> tuple[Any, list[str], set[str]]:
    """Generate on the modelled device. Return the tokens, the faults, and the kinds of waits."""
    with patch.object(workspace, "LEAST_WORKSPACE", 1024), modelled_device(False) as mode:
        tokens = generate(CUDA, make_library(mode), mode.adopt, mode.machine)
        return tokens, mode.machine.faults, set(mode.machine.waits)


def test_drafts_on_the_device_are_those_of_the_cpu() -> None:
    expected, drafted = generate(torch.device("cpu"), interpreter, lambda weights: weights, None)
    assert drafted > 5
    found, seen, _ = faults()
    assert found == (expected, drafted) and seen == []


@pytest.mark.parametrize(
    ("plant", "fault"),
    [
        (planted.drafted_token_on_another_stream, "is not ordered after"),
        (planted.drafts_are_read_early, "on the host is not ordered after a copy to the host"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_an_order_that_depends_on_the_speed_of_streams_is_found(plant: planted.Plant, fault: str, monkeypatch: planted.Patch) -> None:
    plant(monkeypatch)
    _, seen, _ = faults()
    assert any(fault in each for each in seen), set(seen)
