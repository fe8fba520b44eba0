"""The comparison with other servers: it reports what it cannot measure, and its verdicts follow the written criteria."""

import sys
import time
from pathlib import Path

import numpy as np
import pytest
from bench.end_to_end.cpu_servers import prepare
from bench.other_servers import environments
from bench.other_servers.environments import Environment, NotMade, Recipe, Say, make
from bench.other_servers.load import Measured
from bench.other_servers.model import Model
from bench.other_servers.process import NotServing, Running, free_port
from bench.other_servers.ratios import kept
from bench.other_servers.requantize import requantize
from bench.other_servers.servers import SERVERS, Command, Setting
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, LlamaFileType
from gguf.quants import dequantize

SLOW, FAST = 100.0, 170.0


def small_model(folder: Path) -> Model:
    return Model("small", folder / "model", folder / "model.gguf")


def measured(rate: float, milliseconds: float, startup: float) -> Measured:
    return Measured(milliseconds, milliseconds, milliseconds, milliseconds, rate, 2048, 0, 0, startup, 1 << 30, 1.0, 0.0)


def test_a_recipe_that_fails_names_its_step_and_leaves_no_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(environment: Environment, say: Say) -> None:
        say.run("the last step", sys.executable, "-c", "print('no such thing'); raise SystemExit(3)")

    monkeypatch.setattr(environments, "PINS", tmp_path)
    (tmp_path / "broken.txt").write_text("")
    monkeypatch.setitem(environments.RECIPES, "broken", Recipe("broken", 1, (fails,)))
    for _ in range(2):
        with pytest.raises(NotMade, match=r"the last step: status 3: .*no such thing"):
            make("broken", tmp_path / "cache")


def test_a_server_without_an_environment_is_reported_and_the_others_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def only_vllm(name: str, cache: Path) -> Environment:
        if name != "vllm":
            raise NotMade(f"no {name} here")
        return Environment(tmp_path)

    monkeypatch.setattr("bench.end_to_end.cpu_servers.make", only_vllm)
    settings, client, missing = prepare(["fairlead", "vllm", "transformers"], tmp_path, small_model(tmp_path))
    assert list(settings) == ["fairlead", "vllm"] and client == Environment(tmp_path)
    assert missing["transformers"] == "no transformers here"


def test_the_environments_key_follows_the_pins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = environments.RECIPES["transformers"]
    before = recipe.key
    monkeypatch.setattr(environments, "PINS", tmp_path)
    (tmp_path / "transformers.txt").write_text("torch==0\n")
    assert recipe.key != before and recipe.key.startswith("transformers-")


def test_verdicts_compare_medians() -> None:
    runs = {
        ("fairlead", "random"): [measured(rate, 80.0, 10.0) for rate in (FAST, 1.0, 1000.0)],
        ("vllm-tuned", "random"): [measured(SLOW, 100.0, 60.0)],
        ("llama.cpp", "random"): [measured(2 * SLOW, 100.0, 1.0)],
        ("fairlead-gguf", "single"): [measured(SLOW, 100.0, 1.0)],
        ("llama.cpp-gguf", "single"): [measured(SLOW, 100.0, 1.0)],
    }
    verdicts = {(k.promise.peer, k.promise.figure): (round(k.ratio, 3), k.ok) for k in kept(runs)}
    assert verdicts == {
        ("vllm-tuned", "tokens_per_second"): (1.7, True),
        ("vllm-tuned", "ttft_p50"): (0.8, True),
        ("vllm-tuned", "itl_p99"): (0.8, True),
        ("vllm-tuned", "startup"): (0.167, True),
        ("llama.cpp", "tokens_per_second"): (0.85, False),
        ("llama.cpp-gguf", "tokens_per_second"): (1.0, True),
    }


def test_a_server_that_dies_reports_its_last_output_and_leaves_no_process(tmp_path: Path) -> None:
    program = (
        "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); print('last words', flush=True)"
    )
    with (
        Running(Command([sys.executable, "-c", program + "; sys.exit(4)"]), free_port(), tmp_path / "log") as server,
        pytest.raises(NotServing, match="status 4: last words"),
    ):
        server.wait_ready()
    deadline = time.monotonic() + 10
    while len(server.processes()) > 1 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(server.processes()) == 1  # its own entry, of a process that was waited for


@pytest.mark.parametrize("name", [name for name, server in SERVERS.items() if not name.startswith("vllm-")])
def test_every_server_listens_on_loopback_at_the_given_port(name: str, tmp_path: Path) -> None:
    published = tmp_path / "model.gguf"
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64}')
    (tmp_path / "model-BF16.gguf").touch()
    (tmp_path / "model-Q8_0.gguf").touch()
    setting = Setting(Environment(tmp_path), Model("smollm2", tmp_path, published), tmp_path, 4711, (0, 1))
    arguments = SERVERS[name].command(setting).arguments
    assert arguments[arguments.index("--host") + 1] == "127.0.0.1"
    assert arguments[arguments.index("--port") + 1] == "4711"


def test_a_requantized_file_has_the_same_metadata_and_nearly_the_same_weights(tmp_path: Path) -> None:
    weights = np.random.default_rng(1).normal(size=(8, 64)).astype(np.float32)
    writer = GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_token_list(["a", "b"])
    writer.add_add_bos_token(False)
    writer.add_file_type(LlamaFileType.ALL_F32)
    writer.add_tensor("output.weight", weights)
    writer.add_tensor("output_norm.weight", weights[0])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    requantize(tmp_path / "a.gguf", tmp_path / "b.gguf", "Q8_0")
    found = GGUFReader(tmp_path / "b.gguf")
    fields = {name: field.contents() for name, field in found.fields.items() if not name.startswith("GGUF.")}
    assert fields == {
        "general.architecture": "llama",
        "general.file_type": LlamaFileType.MOSTLY_Q8_0,
        "tokenizer.ggml.tokens": ["a", "b"],
        "tokenizer.ggml.add_bos_token": False,
    }
    matrix, vector = found.tensors
    assert matrix.tensor_type == GGMLQuantizationType.Q8_0 and vector.tensor_type == GGMLQuantizationType.F32
    assert list(matrix.shape) == [64, 8] and np.allclose(dequantize(matrix.data, matrix.tensor_type), weights, atol=0.02)
    assert np.array_equal(vector.data, weights[0])
