"""A worker with recurrent layers: hits and their header, and structured output beside overlapped steps and drafted tokens."""

from pathlib import Path

import pytest
from tests.models import save_model
from tests.worker.api.process import WorkerProcess

from fairlead.random_model.build import make_model


@pytest.mark.parametrize("family", ["qwen3_next", "mamba2"])
def test_a_worker_with_recurrent_layers(family: str, tmp_path: Path) -> None:
    model = make_model(tmp_path / "tiny", "qwen3", vocab=1024, layers=1)
    save_model(family, model, vocab_size=1024)
    speculation = '{"method": "ngram", "num_speculative_tokens": 3}'
    speculates = family == "qwen3_next"
    flags = ["--overlap", "on", "--limits", '{"state_snapshots": 4}', "--block-tokens", "32"]
    flags += ["--speculative-config", speculation] if speculates else []
    worker = WorkerProcess(model, tmp_path / "worker", *flags)
    try:
        worker.wait_ready()
        info = worker.client.get("/server_info").json()
        assert "each of 260 slots" in info["kv_groups"] and info["overlap"].startswith("off: each step is read" if speculates else "on")
        name = worker.client.get("/v1/models").json()["data"][0]["id"]
        asked = {"model": name, "prompt": list(range(5, 105)), "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        answers = [worker.post("/v1/completions", **asked) for _ in range(2)]
        assert [answer.status_code for answer in answers] == [200, 200], answers[0].text
        assert answers[0].json()["choices"][0]["text"] == answers[1].json()["choices"][0]["text"]
        assert [answer.headers["x-fairlead-cached-tokens"] for answer in answers] == ["0", "96"]
        choice = worker.complete(model=name, prompt="one", max_tokens=40, structured_outputs={"choice": ["left", "right"]})
        assert choice["choices"][0]["text"] in ("left", "right")
    finally:
        worker.kill()
