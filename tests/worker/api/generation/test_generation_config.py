"""A model's own sampling defaults."""

import json
from pathlib import Path

import pytest
from tests.worker.api.process import WorkerProcess

from fairlead_worker.api.generation.sampling import read_options
from fairlead_worker.api.schema import ChatRequest, CompletionRequest
from fairlead_worker.config import WorkerConfig
from fairlead_worker.model.generation_config import find_defaults, sampling_defaults


def test_what_is_valid_is_taken_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert sampling_defaults(tmp_path) == {}
    path = tmp_path / "generation_config.json"
    for text in ("[1]", "{", "null"):
        path.write_text(text)
        assert sampling_defaults(tmp_path) == {}
    path.write_text(json.dumps({"temperature": 0.6, "top_k": 20, "top_p": 7, "min_p": True, "max_new_tokens": 3, "do_sample": True}))
    assert sampling_defaults(tmp_path) == {"temperature": 0.6, "top_k": 20}
    assert "top_p 7 is not between" in caplog.text and "min_p True" in caplog.text


def test_request_fields_override_the_generation_config() -> None:
    defaults = {"temperature": 0.6, "top_k": 20, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.2}
    base = read_options(ChatRequest(), defaults).sampling
    assert {name: getattr(base, name) for name in defaults} == defaults
    own = read_options(CompletionRequest(temperature=0, top_k=-1, top_p=1, min_p=0, repetition_penalty=1), defaults).sampling
    assert (own.temperature, own.top_k, own.top_p, own.min_p, own.repetition_penalty) == (0, 0, 1, 0, 1)
    plain = read_options(ChatRequest(), {}).sampling
    assert (plain.temperature, plain.top_k, plain.top_p, plain.min_p, plain.repetition_penalty) == (1, 0, 1, 0, 1)


def test_another_folder_gives_them_instead(tmp_path: Path) -> None:
    model, other = tmp_path / "model", tmp_path / "other"
    for folder, temperature in ((model, 0.5), (other, 0.2)):
        folder.mkdir()
        (folder / "generation_config.json").write_text(json.dumps({"temperature": temperature}))
    assert [find_defaults(value, model) for value in ("auto", "none", str(other))] == [{"temperature": 0.5}, {}, {"temperature": 0.2}]
    assert WorkerConfig.from_command_line(["--model", "o/n", "--generation-config", str(other)]).generation_config == str(other)
    with pytest.raises(SystemExit):
        WorkerConfig.from_command_line(["--model", "o/n", "--generation-config", str(tmp_path)])


def test_a_worker_applies_and_names_them(narrow: WorkerProcess, shared: WorkerProcess) -> None:
    """The authors of the narrow worker's settings ask for greedy answers."""

    def texts(worker: WorkerProcess) -> set[str]:
        return {choice["text"] for choice in worker.complete(prompt="The sea", max_tokens=16, ignore_eos=True, n=4)["choices"]}

    assert len(texts(narrow)) == 1 and len(texts(shared)) > 1
    assert "sampling defaults from generation_config.json: temperature 0 (" in narrow.log.read_text()
    assert "sampling defaults from generation_config.json" not in shared.log.read_text()
