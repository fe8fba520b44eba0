"""`fairlead check` and `fairlead models`: what they print, and their status."""

import json
from pathlib import Path

import pytest
from tests.models import save_model
from tests.worker.api.process import WorkerProcess

from fairlead.check.command import read_size
from fairlead.errors import UserError
from fairlead.main import main
from fairlead.random_model import make_model
from fairlead_worker.model.catalog import ENCODERS, REFUSED, SERVED
from fairlead_worker.model.families.registry import FAMILIES


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    capsys.readouterr()  # of what the test did before
    with pytest.raises(SystemExit) as ended:
        main(words)
    output = capsys.readouterr()
    return int(ended.value.code or 0), output.out, output.err


def test_json_has_what_the_worker_reserves(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", arch="gemma3")
    status, out, _ = run(capsys, "check", str(folder), "-o", "json", "--context", "1000", "--kv-pages", "600", "--max-num-seqs", "7")
    report = json.loads(out)
    assert status == 0 and report["served"] and report["problem"] == ""
    assert (report["context"], report["streams"], report["kv_tokens"]) == (1000, 7, 9600)
    worker = WorkerProcess(folder, tmp_path / "worker", "--max-num-seqs", "7")
    try:
        worker.wait_ready()
        metrics = worker.client.get("/metrics").text
        pages = next(float(line.rpartition(" ")[2]) for line in metrics.splitlines() if line.startswith("fairlead_kv_pages{"))
        assert pages * 16 == report["kv_tokens"]
        assert f"{report['max_model_len']}" in worker.client.get("/v1/models").text
    finally:
        worker.stop()


def test_a_table_says_yes_or_no_and_what_to_change(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    status, out, err = run(capsys, "check", str(tmp_path), "--gpu", "h100", "--dtype", "bfloat16")
    assert status == 0 and err == ""
    for text in ("yes", "H100 with 79.65 GiB", "FlashInfer does not support heads of 16", "256 of 4096 tokens at once"):
        assert text in out
    status, out, err = run(capsys, "check", str(tmp_path), "--kv-pages", "2", "--memory", "4GiB")
    assert status == 1 and "no" in out
    assert "cannot be served so: a request of 4096 tokens needs" in err and "raise --kv-pages" in err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--gpu", "H1000"), "--gpu H1000: did you mean H100?"),
        (("--gpus", "2"), "--gpus 2: must be 1 or more, and above 1 it needs --gpu NAME"),
        (("--memory", "4 apples"), "--memory 4 apples: is no size; give one as in 16GiB"),
        (("--memory", "4GiB", "--gpu", "L4"), "give the GPU's memory as --gpu 4GiB"),
        (("--tensor-parallel-size", "2"), "--tensor-parallel-size: give --gpus instead"),
        (("--context", "-5"), "--context -5: must be a number of tokens"),
    ],
)
def test_wrong_arguments_name_the_fix(words: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    status, _, err = run(capsys, "check", str(tmp_path), *words)
    assert status == 2 and says in err


def test_a_missing_model_and_a_wrong_flag(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    status, _, err = run(capsys, "check", str(tmp_path / "none"))
    assert status == 2 and "give a folder with config.json and *.safetensors" in err
    save_model("llama", tmp_path)
    status, _, err = run(capsys, "check", str(tmp_path), "--dtype", "int3")
    assert status == 2 and "--dtype" in err


def test_sizes() -> None:
    assert read_size("--memory", "16GiB") == read_size("--memory", "16Gi") == read_size("--memory", "16g") == 16 << 30
    assert read_size("--memory", "1.5GiB") == 3 << 29
    with pytest.raises(UserError):
        read_size("--memory", "0GiB")


def test_the_list_of_families_is_that_of_the_tests(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "models", "-o", "json")
    found = json.loads(out)
    assert status == 0
    decoders = [row for row in found["served"] if row["path"] in ("native", "layers", "transformers")]
    assert [row["family"] for row in decoders] == list(SERVED) and len({row["model_type"] for row in decoders}) >= 75
    assert {row["family"] for row in found["served"] if row["path"] == "encoder"} == set(ENCODERS) == set(FAMILIES)
    assert {row["family"]: row["reason"] for row in found["refused"]} == {name: each.reason for name, each in REFUSED.items()}
    status, out, _ = run(capsys, "models")
    assert status == 0 and "qwen3_next" in out and "served" in out
