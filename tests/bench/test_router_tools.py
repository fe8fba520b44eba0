"""The router's benchmark: its mock worker and load client work together, and its figures are defined as documented."""

import os
import shutil
from pathlib import Path

import pytest
from bench.other_servers.process import free_port
from bench.router.proxy import ratios
from bench.router.tools import NoCompiler, Scenario, Tools, build, load, mock_worker

CORES = sorted(os.sched_getaffinity(0))[:1]
LOADS = (Scenario("whole", 4), Scenario("stream", 4, 16), Scenario("paced", 4, 16, 1000))


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Tools:
    if not any(shutil.which(name) for name in ("cc", "gcc", "clang")):
        pytest.skip("no C compiler: the benchmark says so too")
    return build(tmp_path_factory.mktemp("tools"))


@pytest.mark.parametrize("scenario", LOADS, ids=lambda scenario: scenario.name)
def test_the_client_counts_what_the_mock_sends(tools: Tools, tmp_path: Path, scenario: Scenario) -> None:
    port = free_port()
    with mock_worker(tools, port, CORES, tmp_path):
        seen = load(tools, port, scenario, CORES, tmp_path, seconds=0.4, warm=0.0)
    assert seen["errors"] == 0 and seen["whole"]["count"] == seen["requests"] > 0
    assert seen["requests"] * scenario.chunks <= seen["chunks"] <= (seen["requests"] + scenario.connections) * max(1, scenario.chunks)
    if scenario.chunks:
        assert 0 < seen["way"]["p50"] <= seen["way"]["p99"] <= 1e6 * 0.4
    if scenario.pace_us:
        assert seen["whole"]["p50"] >= scenario.pace_us * (scenario.chunks - 1)


def test_without_a_compiler_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(NoCompiler, match="install gcc"):
        build(tmp_path)


def test_ratios_are_ours_divided_by_the_peers() -> None:
    table = {("fairlead", "busy"): {"rps": 9.0, "rps_cpu": 1.0}, ("sglang-router", "busy"): {"rps": 20.0, "rps_cpu": 0.1}}
    found = {(ratio["peer"], ratio["figure"]): (ratio["ratio"], ratio["kept"]) for ratio in ratios(table)}
    assert found == {("sglang-router", "rps"): (0.45, False), ("sglang-router", "rps_cpu"): (10.0, True)}
