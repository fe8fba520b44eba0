"""`fairlead check` knows what real models take of a machine: within 10 % of the processes' memory, and every page of their KV."""

from pathlib import Path
from time import sleep

import pytest
from tests.real_models import GEMMA3, MINILM, SMOLLM2, real_folder, real_model
from tests.worker.api.process import PAGES, WorkerProcess

from fairlead_worker.check.report import check_model
from fairlead_worker.config import WorkerConfig
from fairlead_worker.kernels.native import AHEAD_BYTES
from fairlead_worker.weights.uri import resolve

FOLDERS = {
    "smollm2": lambda: real_folder(SMOLLM2),
    "gemma3": lambda: real_folder(GEMMA3),
    "smollm2 as gguf": lambda: real_model(SMOLLM2),
    "minilm": lambda: real_model(MINILM),
}


def anonymous_bytes(pid: int) -> int:
    """Return the memory of a process and of those that it started, without files."""
    pids = [pid, *(int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split())]
    return sum(
        int(line.split()[1]) << 10
        for each in pids
        for line in Path(f"/proc/{each}/smaps_rollup").read_text().splitlines()
        if line.startswith("Pss_Anon:")
    )


@pytest.mark.parametrize("name", FOLDERS)
def test_what_a_worker_takes(name: str, tmp_path: Path) -> None:
    model = FOLDERS[name]()
    config = WorkerConfig(model=f"file://{model}", kv_pages=PAGES)
    folder = resolve(config.model)
    report = check_model(config, folder, None, context=1000)
    assert report.served, report.problem
    # The embedding stays in its mapped file, and a thread makes the first part of the KV resident.
    is_decoder = report.path != "encoder"
    mapped, resident = (embedding_bytes(folder, name), min(AHEAD_BYTES, report.kv_bytes)) if is_decoder else (0, 0)
    predicted = pytest.approx(report.process_bytes + report.weight_bytes - mapped, rel=0.1)
    worker = WorkerProcess(model, tmp_path)
    try:
        worker.wait_ready()
        for _ in range(100):
            if (taken := anonymous_bytes(worker.process.pid) - resident) == predicted:
                break
            sleep(0.2)
        metrics = worker.client.get("/metrics").text
    finally:
        worker.stop()
    if is_decoder:
        assert f" {PAGES}.0\n" in metrics.partition("\nfairlead_kv_pages{")[2] and report.kv_tokens == PAGES * 16
    assert taken == predicted


def embedding_bytes(folder: Path, name: str) -> int:
    from fairlead_worker.model.formats.gguf import find_gguf
    from fairlead_worker.model.pooling import read_json

    config = read_json(folder / "config.json")
    assert isinstance(config, dict)
    bits = 5 if find_gguf(folder) else 16  # Q4_1: 20 bytes for 32 numbers
    return int(config["vocab_size"] * config["hidden_size"] * bits // 8)
