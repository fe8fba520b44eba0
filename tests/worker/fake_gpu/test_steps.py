"""Steps of every family on a fake GPU: no operation mixes devices, and the host waits only where `waits` says why."""

import pytest
from tests.worker.execution.planner import Planner, make_request
from tests.worker.fake_gpu.device.gpu import FakeGpu
from tests.worker.fake_gpu.runs import ALL, DRAWN, GREEDY, PAGE, PAGES, SAMPLINGS, load, serve
from tests.worker.fake_gpu.waits import unexpected

from fairlead_worker.execution.runner_builder import RunnerBuilder
from fairlead_worker.ipc.messages import Sampling

REFERENCE = {"deepseek_v3", "gpt_oss"}
"""Families whose attention FlashInfer does not serve."""
SAME = {"tied qwen2", "linear rope", "llama3 rope"}
"""Families with the operations of others: only numbers differ."""


@pytest.mark.parametrize("family", [family for family in ALL if family not in SAME])
def test_the_steps_of_a_family_do_not_wait(gpu: FakeGpu, family: str) -> None:
    """Prompts, chunks beside decodes, and decodes alone, in a CUDA graph where that is possible."""
    runner = RunnerBuilder(loaded=load(family), page_size=PAGE, kv_pages=PAGES, graph_rows=2).build()
    assert runner.backend.name == ("reference" if family in REFERENCE else "flashinfer")
    gpu.record.clear()
    serve(runner, GREEDY, DRAWN)
    assert unexpected(gpu.record) == []
    graphed = family not in REFERENCE
    assert (runner.graphs is not None and runner.graphs.is_recorded) == graphed
    assert (gpu.record.launches < len(gpu.record.kernels)) == graphed, "a graph is one launch"


def test_long_prompts_use_fa3_and_short_ones_fa2(gpu: FakeGpu) -> None:
    """4 heads and 132 processors: fa3 has a full tile for each from 6,336 tokens, in tiles of 192 for heads of 64."""
    runner = RunnerBuilder(loaded=load("llama"), page_size=PAGE, kv_pages=1000).build()
    for tokens, kernel in ((6335, "prefill"), (6336, "prefill fa3")):
        gpu.record.clear()
        Planner([make_request("0", [2] * tokens, GREEDY)], 1000, PAGE).run(runner)
        used = {name for name in gpu.record.by_name() if "prefill" in name}
        assert used == {f"flashinfer.{kernel}"}
    assert unexpected(gpu.record) == []


def test_no_sampling_setting_waits_twice(gpu: FakeGpu) -> None:
    runner = RunnerBuilder(loaded=load("llama"), page_size=PAGE, kv_pages=PAGES).build()
    for name, settings in SAMPLINGS.items():
        gpu.record.clear()
        serve(runner, GREEDY, Sampling(max_tokens=2, ignore_eos=True, **settings))
        assert unexpected(gpu.record) == [], name
