"""vLLM's paths for looking at a server, and SageMaker's two paths."""

import os
from pathlib import Path
from typing import Any

from tests.servers.redis_server import RedisServer
from tests.worker.api.process import WorkerProcess

CHAT = [{"role": "user", "content": "one two"}]
PROMPT = list(range(5, 105))


FAULT = """
import sys
from importlib.machinery import PathFinder


class Plant:
    def find_spec(self, name, path=None, target=None):
        if name == "fairlead_worker.execution.trial":
            sys.meta_path.remove(self)
            spec = PathFinder.find_spec(name, path)
            execute = spec.loader.exec_module

            def exec_module(module):
                execute(module)
                module.try_graphs = lambda *_: "CUDA graphs failed the start-up trial and are off: planted"

            spec.loader.exec_module = exec_module
            return spec


sys.meta_path.insert(0, Plant())
"""
"""A module that Python imports at its start: the trial then fails."""


def test_server_info_has_every_setting_and_no_password_and_every_page_a_failed_start_up_trial(
    start: Any, redis: RedisServer, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(FAULT)
    path = os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", "")))
    url = redis.url.replace("redis://", "redis://:not-the-password@")
    secrets = {"FAIRLEAD_REDIS_URL": url, "FAIRLEAD_INDEX_NAMESPACE": "test/secret", "FAIRLEAD_NODES_SECRET": "s" * 32}
    worker = start("--overlap", "on", PYTHONPATH=path, **secrets).wait_ready()
    answer = worker.client.get("/server_info")
    said = answer.json()
    assert "not-the-password" not in answer.text and "s" * 32 not in answer.text
    assert said["settings"]["kv_pages"] == "600" and said["max_model_len"] == 4096
    assert said["system_fingerprint"] == worker.complete(prompt="x", max_tokens=1)["system_fingerprint"]
    assert said["cuda_graphs"] == "off: no CUDA graphs with a CPU" and said["overlap"] == "on"
    assert said["decoder"] == ("layers" if said["cpu_level"] == "none" else "native")
    why = said["fallback"]
    assert why == "CUDA graphs failed the start-up trial and are off: planted"
    assert worker.client.get("/ready").json()["fallback"] == worker.load()["fallback"] == why
    assert 'fairlead_engine_fallback{model_name="tiny"} 1.0' in worker.client.get("/metrics").text


def test_tokenizer_info_has_the_template_and_sizes(shared: WorkerProcess) -> None:
    said = shared.client.get("/tokenizer_info").json()
    assert (said["vocab_size"], said["model_max_length"]) == (1024, 4096)
    assert "messages" in said["chat_template"] and said["eos_token"]


def test_a_reset_drops_what_no_request_uses(shared: WorkerProcess) -> None:
    def cached() -> int:
        answer = shared.complete(prompt=PROMPT, max_tokens=1)
        count: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        return count

    cached()
    assert cached() > 0
    assert shared.post("/reset_prefix_cache").json()["dropped_pages"] > 0
    assert shared.load()["pages_free"] == shared.load()["pages_total"]
    assert cached() == 0
    with shared.stream("/v1/completions", prompt=PROMPT, max_tokens=50, temperature=0, ignore_eos=True) as (_, events):
        next(events)
        assert shared.post("/reset_prefix_cache").status_code == 200
        assert list(events)[-1] == "[DONE]"


def test_ping_and_health_are_200_while_requests_are_served(shared: WorkerProcess) -> None:
    for method, path in (("GET", "/ping"), ("POST", "/ping"), ("GET", "/health"), ("GET", "/livez")):
        assert shared.client.request(method, path).status_code == 200, path
    assert shared.load()["server_load"] == 0


def test_invocations_choose_the_api_by_the_body(shared: WorkerProcess) -> None:
    for path, body in (
        ("/v1/chat/completions", {"messages": CHAT, "max_tokens": 3, "temperature": 0}),
        ("/v1/completions", {"prompt": "one", "max_tokens": 3, "temperature": 0}),
        ("/v1/embeddings", {"input": "one"}),
        ("/rerank", {"query": "a", "documents": ["b"]}),
        ("/score", {"queries": "a", "items": ["b"]}),
    ):
        one, two = shared.post("/invocations", **body), shared.post(path, **body)
        assert one.status_code == 200, one.text
        key = "choices" if "choices" in two.json() else "results" if "results" in two.json() else "data"
        assert one.json()[key] == two.json()[key]
    refused = shared.post("/invocations", text_1="a")
    assert refused.status_code == 400 and "text_1 and text_2" in refused.json()["error"]["message"]
    with shared.stream("/invocations", messages=CHAT, max_tokens=2) as (_, events):
        assert list(events)[-1] == "[DONE]"


def test_pooling_returns_the_embedding_in_vllms_form(shared: WorkerProcess) -> None:
    said = shared.post("/pooling", input=["one", "two"]).json()
    assert said["object"] == "list" and said["usage"]["prompt_tokens"] > 0
    wanted = [each["embedding"] for each in shared.post("/v1/embeddings", input=["one", "two"]).json()["data"]]
    assert said["data"] == [{"index": index, "object": "pooling", "data": vector} for index, vector in enumerate(wanted)]


def test_anthropics_clients_get_their_form_of_models(shared: WorkerProcess) -> None:
    headers = {"anthropic-version": "2023-06-01"}
    said = shared.client.get("/v1/models", headers=headers).json()
    assert (said["first_id"], said["last_id"], said["has_more"]) == ("tiny", "tiny", False)
    (model,) = said["data"]
    assert model == shared.client.get("/v1/models/tiny", headers=headers).json()
    assert (model["type"], model["id"], model["max_input_tokens"]) == ("model", "tiny", 4096) and model["created_at"].endswith("Z")
    assert shared.client.get("/v1/models").json()["object"] == "list"
