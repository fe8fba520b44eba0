"""`make gpu-check` without a GPU: every stage on the CPU, tiny and with FlashInfer interpreted; its report; the files of its bundle."""

import contextlib
import gc
import itertools
import json
import os
import subprocess
import tarfile
import time
import zipfile
from pathlib import Path

import pytest
import torch
from bench.common import report as report_module
from bench.gpu import bundle, compile, interpreter, roofline
from bench.gpu import check as gpu_check
from bench.gpu.check import FIRST, GROUPS, POINTS, SECONDS, carry_out, main, seconds_for, stages
from bench.gpu.device import Device
from bench.gpu.loop import Loop
from bench.gpu.models.low_bit_weights import by_token
from bench.gpu.report import Report, beside
from bench.gpu.shared_model import Kit, make
from bench.gpu.stages import compare
from bench.gpu.stages.layers import quantized
from tests.models import one_thread

from fairlead_worker.scheduler.request import lease_of

__all__ = ["one_thread"]
MEASURED = ("step_time", "kernel_busy_time", "prompt_arrival", "transformers_batching")
"""Results that need no check."""
BARRED = (*POINTS, "kernel_busy_time", "transformers_batching", "overlap", "groups", "latents")
STAGES = tuple(name for name, _, _ in stages(Device(torch.device("cpu"), True, 0.0), []))
ROOFLINES = tuple(name for name in STAGES if name not in ("sampling", "greedy", "attention", "logits", "memory", "ranks", "compare"))
"""Stages whose figures stand beside what the device allows. The others check results, or need a second GPU or another server."""


@pytest.fixture(autouse=True)
def no_collections(monkeypatch: pytest.MonkeyPatch) -> None:
    """Collect no garbage, which frees a device's memory: with the objects of a whole test run it takes half of a stage's time on a CPU."""
    monkeypatch.setattr(gc, "collect", lambda *_: 0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_without_a_gpu_the_command_says_so_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 1 and "no GPU found on this machine" in out


@pytest.mark.parametrize("name", STAGES)
def test_every_stage_runs_on_a_cpu(name: str, tmp_path: Path) -> None:
    device = Device(torch.device("cpu"), True, time.monotonic() + 250)
    report = Report(tmp_path, device.facts())
    known = {stage: run for stage, _, run in stages(device, [])}
    carry_out(report, name, 250, known[name])
    assert report.path is not None
    written = json.loads(report.path.read_text())
    assert not report.failed and written["results"]["stages"][name]["state"] == "done"
    assert {"date", "commit", "cpu", "cpu_level", "torch"} <= written["machine"].keys() and written["machine"][
        "flashinfer"
    ] == "interpreted"
    rows = written["results"]["stages"][name]["rows"]
    assert rows and (name in MEASURED or any(row.get("ok") for row in rows) or (name == "ranks" and "2 GPUs" in rows[0]["said"]))
    assert any("bar" in row for row in rows) == (name in BARRED)
    assert name not in ROOFLINES or any(map(has_roofline, rows)) or (len(rows) == 1 and "left_out" in rows[0])
    assert all(has_roofline(row) for row in rows if any(key.endswith("tokens_per_s") for key in row))


def has_roofline(row: dict[str, object]) -> bool:
    return any(key.endswith(("of_roofline", "of_ideal")) for key in row)


def test_the_summary_shows_figures_beside_their_targets(tmp_path: Path) -> None:
    report = Report(tmp_path, {})
    rows = [beside({"what": "one", "busy": 0.98}, "busy", least=0.97), beside({"what": "two", "seconds": 31.0}, "seconds", most=30)]
    carry_out(report, "some", 10, lambda: iter_rows(rows))
    told = report.summary().splitlines()
    assert told[:2] == ["gpu_check ok", "bars: 1 of 2 are met"], "a missed target is no failure"
    assert told[2:] == ["  met  one: 0.98 (busy at least 0.97)", "  MISSED two: 31 (seconds at most 30)"]
    assert report.path is not None and len(json.loads(report.path.read_text())["results"]["bars"]) == 2


def iter_rows(rows: list[dict[str, object]]):
    yield from rows


def test_measured_decodes_share_no_pages(tmp_path: Path) -> None:
    """Shared pages would be read from a device's cache, which is faster than its memory."""
    runner = make(Device(torch.device("cpu"), True, time.monotonic() + 60, tmp_path), "tiny", 40)
    loop = Loop(runner, overlap=True, max_num_seqs=3, chunked_prefill_size=0, max_prefill_tokens=72)
    for number in range(3):
        loop.submit(number, [number + place for place in range(24)], 5)
    loop.pretend()
    pages = [page for request in loop.scheduler.running for page in lease_of(request).pages]
    assert len(pages) == len(set(pages)) == 6 and [len(tokens) for tokens in loop.tokens.values()] == [1, 1, 1]
    loop.run()
    assert [len(tokens) for tokens in loop.tokens.values()] == [len(times) for times in loop.times.values()] == [5, 5, 5] and not loop.live


def test_quantized_weights_are_skipped_without_their_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized, "find_spec", lambda name: None if name == "compressed_tensors" else name)
    device = Device(torch.device("cpu"), True, time.monotonic() + 60)
    (row,) = quantized.measure(device, Kit(device))
    assert row["ok"] and row["left_out"] == "not installed: compressed-tensors"


def test_one_failing_weight_format_does_not_skip_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(base: quantized.Base, kind: quantized.Kind, folder: Path, sizes: quantized.Sizes):
        raise RuntimeError("no kernel")
        yield {}

    for package in ("torchao", "accelerate", "compressed_tensors"):
        pytest.importorskip(package, reason="the extra gpu is not installed")
    monkeypatch.setattr(quantized, "_kind", broken)
    device = Device(torch.device("cpu"), True, time.monotonic() + 60)
    failed = [row for row in quantized.measure(device, Kit(device)) if row.get("ok") is False]
    assert [(row["what"], row["said"]) for row in failed] == [(kind, "RuntimeError: no kernel") for kind in ("fp8", "kept")]


def test_nan_counts_as_infinitely_different() -> None:
    said = torch.ones(2, 4)
    assert quantized.apart(said, said) == 0 and quantized.apart(said * torch.nan, said) == quantized.apart(None, said) == torch.inf


def test_inputs_are_scaled_by_the_maximum_of_each_token() -> None:
    tokens = torch.tensor([[7.0, 3.3, -0.02], [700.0, 330.0, -2.0], [0.0, 0.0, 0.0]])
    rounded = by_token(tokens)
    assert ((rounded - tokens).abs() <= 2**-4 * tokens.abs()).all() and not rounded[2].any()
    assert torch.allclose(rounded[1], 100 * rounded[0]) and rounded[0, 1] != tokens[0, 1]


def test_an_interrupted_run_prints_its_figures(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def stage():
        yield beside({"what": "one", "busy": 0.98}, "busy", least=0.97)
        raise KeyboardInterrupt

    monkeypatch.setattr(gpu_check, "stages", lambda device, builds: [("kernel_busy_time", 10.0, stage), ("overlap", 10.0, stage)])
    assert main(["--device", "cpu", "--only", "kernel_busy_time,overlap"]) == 1
    told = capsys.readouterr().out
    assert "bars: 1 of 1 are met" in told and "kernel_busy_time: failed: interrupted" in told and "overlap" not in told


def test_an_unknown_stage_is_named() -> None:
    with pytest.raises(SystemExit, match="no stage is called nope: choose from sampling"):
        main(["--device", "cpu", "--only", "nope"])


def test_a_run_that_is_cut_short_prints_its_findings(tmp_path: Path) -> None:
    report = Report(tmp_path, {})
    carry_out(report, "endless", 0.05, lambda: ({"what": number, "ok": True} for number in itertools.count()))

    def broken():
        yield {"what": "wrong", "ok": False}
        raise RuntimeError("the device is gone")

    carry_out(report, "broken", 10, broken)
    assert report.path is not None
    written = json.loads(report.path.read_text())["results"]["stages"]
    assert written["endless"]["rows"] and written["endless"]["state"].startswith("out of time")
    assert written["broken"]["rows"] == [{"what": "wrong", "ok": False}]
    assert written["broken"]["state"] == "failed: RuntimeError: the device is gone"
    assert len(report.failed) == 2


def test_a_stage_that_overruns_is_stopped_and_the_rest_goes_on(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Also inside of a row, and where a stage handles all errors of what it measures."""
    ended = []

    def hangs():
        try:
            yield {"what": "before", "ok": True}
            with contextlib.suppress(Exception):
                while True:
                    time.sleep(0.01)
        finally:
            ended.append("its processes")

    def follows():
        yield {"what": "after", "ok": True}

    monkeypatch.setattr(gpu_check, "FIRST", {"sampling": 0.3})
    monkeypatch.setattr(gpu_check, "stages", lambda device, builds: [("sampling", 10.0, hangs), ("logits", 10.0, follows)])
    assert main(["--device", "cpu"]) == 0
    told = capsys.readouterr().out
    assert told.index("what=before") < told.index("out of time after 0 s") < told.index("what=after") and ended == ["its processes"]


def test_the_first_three_minutes_have_correctness_and_the_headline_figures() -> None:
    assert STAGES[:4] == ("sampling", "greedy", "attention", "headline") and sum(FIRST.values()) <= 180


def test_the_points_are_settled_in_ten_minutes_in_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if each stage takes all of its limit."""
    ran, known = list[str](), stages(Device(torch.device("cpu"), True, 0.0), [])
    assert sum(FIRST.get(name, most) for name, most, _ in known if name in GROUPS["points"]) <= 600
    monkeypatch.setattr(gpu_check, "stages", lambda *_: [*known])
    monkeypatch.setattr(gpu_check, "carry_out", lambda report, name, seconds, stage: ran.append(name))
    gpu_check.run("cpu", tmp_path, "points", 60)
    assert ran == [name for name in GROUPS["points"] if name not in ("compilers", "compiled")]


def test_all_stages_together_keep_the_limit_and_inherit_unused_time() -> None:
    known = stages(Device(torch.device("cpu"), True, 0.0), [])

    def spend(share: float) -> dict[str, float]:
        left, limits = SECONDS, {}
        for place, stage in enumerate(known):
            limits[stage[0]] = seconds_for(stage, known[place + 1 :], left)
            left -= share * limits[stage[0]]
        assert left >= -1e-6
        return limits

    slow, fast = spend(1.0), spend(0.5)
    assert sum(slow.values()) <= SECONDS + 1e-6 and min(slow.values()) >= 5
    assert all(fast[name] > slow[name] for name in STAGES if name not in FIRST)


@pytest.mark.parametrize(
    ("name", "terabytes"),
    [("NVIDIA H200", 4.8), ("NVIDIA H100 80GB HBM3", 3.35), ("NVIDIA H100 PCIe", 2.0), ("NVIDIA A100-SXM4-80GB", 2.039)],
)
def test_a_devices_rates_are_those_of_its_data_sheet(name: str, terabytes: float) -> None:
    rates = roofline.find_sheet(name)
    assert rates is not None and rates.bytes_per_s == pytest.approx(terabytes * 1e12)
    assert roofline.find_sheet("NVIDIA GeForce RTX 4090") is None


def test_the_roofline_of_a_step_reads_weights_and_kv_once() -> None:
    """Llama 3.1 8B at 64 streams and 2k: 15 GB of weights without the embedding, and 128 KiB of KV for each token."""
    moved, flops = roofline.decode_work("8b", 64, 2048)
    assert moved == pytest.approx(15.0e9 + 64 * 2048 * 131_072, rel=0.01)
    assert roofline.SHEETS["H200"].seconds(moved, flops) == pytest.approx(moved / 4.8e12), "memory bounds it"
    work = roofline.prefill_work("8b", 8192)
    assert roofline.SHEETS["H200"].seconds(*work) == work[1] / 989e12 and work[1] == pytest.approx(1.32e14, rel=0.05)


def test_the_roofline_of_requests_is_their_prompts_and_a_decode_for_each_later_token() -> None:
    """A quarter of Llama 3.1 8B: 1.745 G numbers in its layers, 0.525 G in its head, 32 KiB of KV for each token."""
    moved, flops = roofline.requests_work("8b-short", [(100, 3), (200, 2)])
    weights, kv = 2 * (1.745e9 + 0.5253e9), 32_768
    assert moved == pytest.approx(3 * weights + (101 + 201 + 102) * kv, rel=0.001)
    assert flops == pytest.approx(2 * 1.745e9 * 300 + 2 * 2 * 0.5253e9 + 3 * weights, rel=0.05), "and attention, below 5 %"


def test_another_server_is_compared_where_it_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package called vllm, whose server is the worker under another name."""
    package = tmp_path / "vllm" / "entrypoints" / "openai"
    package.mkdir(parents=True)
    for folder in (tmp_path / "vllm", package.parent, package):
        (folder / "__init__.py").touch()
    (package / "api_server.py").write_text(OTHER_SERVER)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setattr(compare, "find_spec", lambda name: name == "vllm" or None)
    device = Device(torch.device("cpu"), True, time.monotonic() + 200, tmp_path / "models")
    (tmp_path / "models").mkdir()
    rows = list(compare.measure(device, Kit(device)))
    assert [row["with"] for row in rows] == ["fairlead", "vllm"] and all(row["ok"] for row in rows), rows
    assert {"ttft_ms_of_vllm", "itl_ms_of_vllm", "output_tokens_per_s_of_vllm"} <= rows[1].keys()


OTHER_SERVER = """
import argparse, os, sys
parser = argparse.ArgumentParser()
for name in ("model", "served-model-name", "port", "dtype", "max-model-len"):
    parser.add_argument(f"--{name}")
given = parser.parse_args()
os.environ["FAIRLEAD_TERMINATION_LOG"] = os.devnull
flags = ["--model", f"file://{given.model}", "--served-model-name", given.served_model_name, "--host", "127.0.0.1", "--port", given.port]
os.execv(sys.executable, [sys.executable, "-m", "fairlead_worker.main", *flags, "--kv-pages", "600", "--threads", "1"])
"""


def test_a_comparison_without_other_servers_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "find_spec", lambda name: None)
    device = Device(torch.device("cpu"), True, time.monotonic() + 60)
    (row,) = compare.measure(device, Kit(device))
    assert row["left_out"] == "neither vllm nor sglang is installed in this environment"


def test_exactly_the_kernels_that_the_stages_use_are_compiled() -> None:
    """A kernel missing here would be compiled, and waited for, within a stage."""
    heads = {kind: compile.layer(kind) for kind in compile.KINDS}
    assert heads["bf16-128"].heads // heads["bf16-128"].kv_heads >= 4, "an 8B model's group: its decodes share the prefill's module"
    assert {compile.kernels(kind) for kind in compile.KINDS} == {"fa2", "fa3"}
    for kind in compile.FUSED:
        compile.run_layer(kind, torch.device("cpu"), interpreter)


def test_cancelled_compilers_leave_no_process_running() -> None:
    process = subprocess.Popen(["sh", "-c", "sleep 60 & echo $!; wait"], stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None
    child = int(process.stdout.readline())
    builds = compile.Builds({"slow": process}, time.monotonic())
    assert [row["what"] for row in builds.stop()] == ["slow"] and builds.kill() == []
    assert not process.stdout.read(), "the process at the other end of the pipe has ended"
    deadline = time.monotonic() + 10
    while lives(child):  # its files are closed before it counts as dead
        assert time.monotonic() < deadline, "a compiler outlives its parent"
        time.sleep(0.01)


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_tree_without_git_is_identified_by_its_bundle(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(report_module, "ROOT", tmp_path)
    monkeypatch.setenv("PATH", "")
    assert report_module.revision() == "unknown"
    (tmp_path / "build" / "gpu-bundle").mkdir(parents=True)
    (tmp_path / "build" / "gpu-bundle" / "commit").write_text("abc1234\n")
    assert report_module.revision() == "abc1234"


def test_only_the_used_parts_of_the_wheel_are_bundled(tmp_path: Path) -> None:
    wheel, archive = tmp_path / "flashinfer.whl", tmp_path / "flashinfer.tar.xz"
    kept = ("flashinfer/__init__.py", "flashinfer/data/csrc/page.cu", "flashinfer/data/include/flashinfer/page.cuh", "x.dist-info/METADATA")
    left = ("flashinfer/data/csrc/fused_moe/big.cu", "flashinfer/data/cutlass/examples/a.cu")
    with zipfile.ZipFile(wheel, "w") as made:
        for name in (*kept, *left):
            made.writestr(name, name)
    bundle.repack(wheel, archive)
    with tarfile.open(archive) as packed:
        assert sorted(packed.getnames()) == sorted(kept)
    assert {"msgspec", "pyzmq", "llguidance", "torchao", "compressed-tensors"} <= {pin.partition("==")[0] for pin in bundle.pins()}
