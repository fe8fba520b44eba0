"""LoRA adapters over HTTP: selected by name, listed, loaded and unloaded while requests run."""

import json
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import AsyncMock, Mock

import pytest
import torch
from msgspec import json as fast
from safetensors.torch import load_file, save_file
from tests.lora import save_adapter
from tests.router.harness import eventually, running_router
from tests.servers.redis_server import RedisServer
from tests.worker.api.process import WorkerProcess, until
from transformers import AutoModelForCausalLM

from fairlead_common.prompts.encoder import PromptFormat
from fairlead_index.hashing import block_hashes, prompt_root
from fairlead_index.reader import IndexReader
from fairlead_worker.api.engine.adapters import Adapters
from fairlead_worker.api.engine.client import EngineClient
from fairlead_worker.api.errors import ApiError
from fairlead_worker.config import WorkerConfig
from fairlead_worker.engine_process import run
from fairlead_worker.ipc.messages import AdapterChanged, AdapterInfo, Failed, FromEngine, Stop, ToEngine

PROMPT = "An adapter answers in its own way. " * 8
MOST = 12


@pytest.fixture(scope="module")
def adapters(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, torch.nn.Module]]:
    """Three adapters of the model, and transformers with peft's version of each."""
    folder = tmp_path_factory.mktemp("adapters")
    made = {}
    for seed, name in enumerate(("first", "second", "third")):
        base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        made[name] = folder / name, save_adapter(base, folder / name, seed)
    return made


@pytest.fixture(scope="module")
def worker(
    model: Path, adapters: dict[str, tuple[Path, torch.nn.Module]], redis: RedisServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[WorkerProcess]:
    flags = ["--dtype", "float32", "--max-loras", "3", "--lora-modules", f"first=file://{adapters['first'][0]}"]
    variables = {"FAIRLEAD_REDIS_URL": redis.url, "FAIRLEAD_INDEX_NAMESPACE": "test/lora", "FAIRLEAD_ALLOW_RUNTIME_LORA_UPDATING": "true"}
    folder = tmp_path_factory.mktemp("worker")
    process = WorkerProcess(model, folder, *flags, "--served-model-name", "tiny,also", **variables)
    yield process.wait_ready()
    assert process.stop() == 0


def load(worker: WorkerProcess, name: str, path: object, **more: object) -> tuple[int, str]:
    response = worker.post("/v1/load_lora_adapter", lora_name=name, lora_path=str(path), **more)
    return response.status_code, response.text


def unload(worker: WorkerProcess, name: str) -> int:
    return worker.post("/v1/unload_lora_adapter", lora_name=name).status_code


def names(worker: WorkerProcess) -> list[str]:
    return [model["id"] for model in worker.client.get("/v1/models").json()["data"]]


def complete_text(worker: WorkerProcess, model: str, prompt: str = PROMPT) -> str:
    text: str = worker.complete(model=model, prompt=prompt, max_tokens=MOST, temperature=0, ignore_eos=True)["choices"][0]["text"]
    return text


def test_what_each_says_is_what_pefts_merged_model_says(worker: WorkerProcess, adapters: dict[str, tuple[Path, torch.nn.Module]]) -> None:
    assert load(worker, "second", adapters["second"][0])[0] == 200
    tokens = worker.post("/tokenize", prompt=PROMPT, model="second").json()["tokens"]
    said = set()
    for name in ("first", "second"):
        merged = adapters[name][1]
        want = merged.generate(torch.tensor([tokens]), max_new_tokens=MOST, do_sample=False, eos_token_id=None, pad_token_id=0)
        text = worker.post("/detokenize", tokens=want[0, len(tokens) :].tolist()).json()["prompt"]
        said.add(text)
        assert complete_text(worker, name) == text
    assert complete_text(worker, "tiny") not in said and len(said) == 2
    assert unload(worker, "second") == 200


def test_they_are_listed_with_their_parent(worker: WorkerProcess, adapters: dict[str, tuple[Path, torch.nn.Module]]) -> None:
    assert names(worker) == ["tiny", "also", "first"]
    listed = worker.client.get("/v1/models/first").json()
    assert (listed["id"], listed["parent"], listed["root"]) == ("first", "tiny", f"file://{adapters['first'][0]}")
    assert worker.client.get("/v1/models/tiny").json()["parent"] is None
    (only,) = worker.load()["adapters"].items()
    assert only[0] == "first" and only[1]["parent"] == "tiny" and len(only[1]["digest"]) == 32


def test_one_comes_and_goes_while_its_request_runs(worker: WorkerProcess, adapters: dict[str, tuple[Path, torch.nn.Module]]) -> None:
    assert load(worker, "third", adapters["third"][0])[0] == 200
    assert load(worker, "third", adapters["third"][0])[0] == 400, "loaded already"
    alone = complete_text(worker, "third")
    with worker.stream("/v1/completions", model="third", prompt=PROMPT, max_tokens=400, temperature=0, ignore_eos=True) as (_, running):
        said = [next(running)]
        assert unload(worker, "third") == 200
        refused = worker.post("/v1/completions", model="third", prompt="x")
        assert refused.status_code == 404 and refused.json()["error"]["code"] == "model_not_found"
        said += running
    choices = [event["choices"][0] for event in said[:-1] if isinstance(event, dict) and event["choices"]]
    assert choices[-1]["finish_reason"] == "length"
    assert "".join(choice["text"] for choice in choices).startswith(alone)
    until(lambda: "LoRA adapter third unloaded" in worker.log.read_text(), "forgotten")
    assert unload(worker, "third") == 404 and "third" not in names(worker)


def test_another_content_under_the_name_shares_no_cache(worker: WorkerProcess, adapters: dict[str, tuple[Path, torch.nn.Module]]) -> None:
    prompt = "Cached for one content alone. " * 20

    def cached() -> int:
        usage = worker.complete(model="mine", prompt=prompt, max_tokens=1)["usage"]
        count: int = usage["prompt_tokens_details"]["cached_tokens"]
        return count

    assert load(worker, "mine", adapters["second"][0])[0] == 200
    before = worker.load()["adapters"]["mine"]["digest"]
    assert cached() == 0 and cached() > 0
    assert load(worker, "mine", adapters["third"][0], load_inplace=True)[0] == 200
    assert worker.load()["adapters"]["mine"]["digest"] != before
    assert cached() == 0
    until(lambda: "LoRA adapter mine unloaded" in worker.log.read_text(), "the old one is forgotten")
    assert load(worker, "mine", adapters["second"][0], load_inplace=True)[0] == 200
    assert cached() > 0, "the same content again finds what it left"
    assert unload(worker, "mine") == 200


async def test_the_index_knows_an_adapters_blocks_by_its_digest(worker: WorkerProcess) -> None:
    prompt = "What the index should know of an adapter. " * 60
    worker.complete(model="first", prompt=prompt, max_tokens=1)
    tokens = worker.post("/tokenize", prompt=prompt).json()["tokens"]
    format = fast.decode(worker.client.get("/internal/prompt-format").content, type=PromptFormat)
    hashes = block_hashes(prompt_root(format, worker.load()["adapters"]["first"]["digest"]), tokens, format.block_tokens)
    reader = IndexReader(worker_redis(worker), "test/lora", deadline=5)

    async def all_blocks_published() -> bool:
        return (await reader.match(hashes)).get(f"127.0.0.1:{worker.port}") == len(hashes) * format.block_tokens

    try:
        await eventually(all_blocks_published, "all blocks are published")
        assert not await reader.match(block_hashes(prompt_root(format), tokens, format.block_tokens))
    finally:
        await reader.close()


async def test_through_a_router_an_adapter_is_listed_and_served_and_its_cache_predicted(worker: WorkerProcess) -> None:
    flags = {"workers": f"static://127.0.0.1:{worker.port}", "redis_url": worker_redis(worker), "index_namespace": "test/lora"}
    body = {"model": "first", "prompt": "What a router foretells of an adapter. " * 40, "max_tokens": 2, "temperature": 0}
    async with running_router(**flags) as router:
        await router.usable(1)
        listed = {model["id"]: model["parent"] for model in (await router.client.get("/v1/models")).json()["data"]}
        assert listed == {"tiny": None, "also": None, "first": "tiny"}

        async def adapter_blocks_predicted() -> bool:
            answer = await router.client.post("/v1/completions", json=body)
            assert answer.status_code == 200 and answer.json()["model"] == "first", answer.text
            predicted, cached = (int(answer.headers.get(f"x-fairlead-{word}-tokens", 0)) for word in ("predicted", "cached"))
            assert predicted <= cached
            return predicted > 0

        await eventually(adapter_blocks_predicted, "the index knows the adapter's blocks")
        assert (await router.client.post("/v1/completions", json=body | {"model": "second"})).status_code == 404


def worker_redis(worker: WorkerProcess) -> str:
    return next(word.partition("=")[2] for word in worker.log.read_text().split() if word.startswith("FAIRLEAD_REDIS_URL="))


@pytest.mark.parametrize(
    ("config", "tensors", "says"),
    [
        ({"use_dora": True}, {}, "use_dora"),
        ({"bias": "all"}, {}, "bias"),
        ({"modules_to_save": ["lm_head"]}, {}, "modules_to_save"),
        ({"peft_type": "IA3"}, {}, "IA3"),
        ({"init_lora_weights": "pissa"}, {}, "pissa"),
        ({"r": 4}, {}, "rank 8"),
        ({"r": "many"}, {}, "rank 8"),
        ({"rank_pattern": {"(": 2}}, {}, "rank_pattern has '(', which is no regular expression"),
        ({"alpha_pattern": [1]}, {}, "alpha_pattern is [1]: it must be an object"),
        ({"lora_alpha": True}, {}, "lora_alpha is True"),
        ({"lora_alpha": float("nan")}, {}, "lora_alpha is nan"),
        ({}, {"base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": torch.zeros(8, 4, dtype=torch.int32)}, "is of int32"),
        ({}, {"base_model.model.model.embed_tokens.lora_embedding_A": torch.zeros(8, 4)}, "lora_embedding_A"),
        ({}, {"base_model.model.model.layers.7.mlp.up_proj.lora_A.weight": torch.zeros(8, 64)}, "other half"),
        ({}, {f"base_model.model.lm_head.lora_{half}.weight": torch.zeros(8, 8) for half in "AB"}, "lm_head"),
        ({}, {f"base_model.model.model.norm.lora_{half}.weight": torch.zeros(8, 8) for half in "AB"}, "no linear layer"),
        ({}, {f"base_model.model.model.layers.9.x.lora_{half}.weight": torch.zeros(8, 8) for half in "AB"}, "has no"),
        ({}, {"base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": torch.full((8, 4), float("nan"))}, "finite"),
        ({}, {"base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": torch.zeros(8, 4)}, "q_proj maps"),
        (None, {}, "JSON"),
        ({}, None, "adapter_model.safetensors"),
    ],
)
def test_a_broken_adapter_is_a_400_that_names_the_field_and_no_more(
    worker: WorkerProcess,
    adapters: dict[str, tuple[Path, torch.nn.Module]],
    tmp_path: Path,
    config: dict[str, object] | None,
    tensors: dict[str, torch.Tensor] | None,
    says: str,
) -> None:
    good = adapters["first"][0]
    settings = json.loads((good / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text("[]" if config is None else json.dumps(settings | config))
    if tensors is not None:
        save_file(load_file(good / "adapter_model.safetensors") | tensors, tmp_path / "adapter_model.safetensors")
    response = worker.post("/v1/load_lora_adapter", lora_name="broken", lora_path=str(tmp_path))
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == "lora_path" and says in error["message"] and "broken" in error["message"]
    assert names(worker) == ["tiny", "also", "first"]
    assert complete_text(worker, "first")


def test_a_pipe_is_no_file_and_blocks_no_request(
    worker: WorkerProcess, adapters: dict[str, tuple[Path, torch.nn.Module]], tmp_path: Path
) -> None:
    """Reading a pipe would wait for a writer and block the engine with all its streams."""
    made = Path(shutil.copytree(adapters["first"][0], tmp_path / "pipe"))
    (made / "adapter_model.safetensors").unlink()
    os.mkfifo(made / "adapter_model.safetensors")
    status, text = load(worker, "pipe", made)
    assert status == 400 and "adapter_model.safetensors is not a regular file" in text
    assert complete_text(worker, "first")


def test_a_path_that_does_not_exist_is_not_found(worker: WorkerProcess) -> None:
    status, text = load(worker, "n", "/nowhere/adapter")
    error = json.loads(text)["error"]
    assert (status, error["param"], error["code"]) == (404, "lora_path", "not_found")


@pytest.mark.parametrize(
    ("name", "path", "param"),
    [
        ("tiny", "/x", "lora_name"),
        ("a b", "/x", "lora_name"),
        ("", "/x", "lora_name"),
        ("n", "", "lora_path"),
        ("n", "ftp://x", "lora_path"),
    ],
)
def test_a_bad_request_names_its_field(worker: WorkerProcess, name: str, path: str, param: str) -> None:
    status, text = load(worker, name, path)
    assert status == 400 and json.loads(text)["error"]["param"] == param


def test_no_more_of_them_than_may_be(worker: WorkerProcess, adapters: dict[str, tuple[Path, torch.nn.Module]]) -> None:
    for name in ("second", "third"):
        assert load(worker, name, adapters[name][0])[0] == 200
    status, text = load(worker, "fourth", adapters["second"][0])
    assert status == 400 and "--max-loras" in text
    assert [unload(worker, name) for name in ("second", "third")] == [200, 200]


def test_a_broken_one_at_the_start_is_the_reason_of_the_end(model: Path, tmp_path: Path) -> None:
    end = End()
    assert run(WorkerConfig(model=f"file://{model}", kv_pages=8, threads=1, lora_modules=[f"sql=file://{tmp_path}/nowhere"]), end) == 1
    assert "LoRA adapter sql" in end.reason and "nowhere" in end.reason


class End:
    """An engine end that keeps the reason of a failure."""

    reason = ""

    def receive(self, timeout: float | None) -> list[ToEngine]:
        return [Stop()]

    def send(self, message: FromEngine) -> None:
        if isinstance(message, Failed):
            self.reason = message.reason


def test_without_the_setting_nothing_is_changed_over_http(shared: WorkerProcess) -> None:
    for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
        response = shared.post(path, lora_name="x", lora_path="/x")
        assert response.status_code == 403 and "FAIRLEAD_ALLOW_RUNTIME_LORA_UPDATING" in response.json()["error"]["message"]


async def test_a_load_that_hangs_is_answered_and_blocks_no_other_load(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the hub does not answer, the load request gets 504. Other adapters load and unload meanwhile, and the load succeeds once the hub
    answers."""
    answers, engine = threading.Event(), Mock(EngineClient)
    engine.change_adapter = AsyncMock(
        side_effect=lambda message: AdapterChanged(message.number, info=AdapterInfo(message.number, message.name, "", "", 8))
    )
    monkeypatch.setattr("fairlead_worker.api.engine.adapters.LOAD_TIMEOUT_SECONDS", 0.2)
    monkeypatch.setattr(
        "fairlead_worker.lora.source.adapter_folder", lambda name, uri, cache: (name != "slow" or answers.wait(30)) and tmp_path
    )
    adapters = Adapters(WorkerConfig(model=f"file://{model}", max_loras=3), engine)
    try:
        with pytest.raises(ApiError) as refused:
            await adapters.load("slow", "hf://a/b", False)
        assert refused.value.status == 504 and "/v1/models" in refused.value.message
        await adapters.load("quick", "hf://c/d", False)
        await adapters.unload("quick")
        assert "slow" not in adapters
    finally:
        answers.set()
    await eventually(lambda: "slow" in adapters, "its load went on")
