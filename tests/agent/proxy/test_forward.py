"""Requests through the agent: what the engine gets, and what routers and clients get."""

import asyncio
import gzip
import itertools
import json
import zlib
from pathlib import Path

import msgspec
from tests.agent.conftest import eventually, pair, running_agent
from tests.agent.kv.engine_pool import BLOCK
from tests.agent.stand_in_engine import FORMAT, StandInEngine
from tests.common.test_json_size import BOMBS
from tests.servers.redis_server import free_port

from fairlead_agent.proxy.app import ADMIN
from fairlead_common.prompts.encoder import PromptEncoder, PromptFormat
from fairlead_index.hashing import token_bytes
from fairlead_index.salts import cache_salt

PROMPT = "The quick brown fox jumps over the lazy dog."


async def test_a_whole_answer_tells_its_usage_in_headers(tmp_path: Path) -> None:
    async with pair(tmp_path) as (engine, agent):
        await agent.complete(PROMPT)
        answer = await agent.complete(PROMPT)
        assert answer.json()["choices"][0]["text"] == " 0 1 2 3"
        cached = (len(PROMPT) - 1) // BLOCK * BLOCK
        assert answer.headers["x-fairlead-cached-tokens"] == str(cached)
        assert answer.headers["x-fairlead-usage"] == f"{len(PROMPT)} 4"
        assert answer.headers["x-fairlead-pod"] == "pod-0"
        assert not any(name.lower().startswith("x-fairlead") for name in engine.headers[0])


async def test_a_stream_ends_with_its_usage_for_the_router(tmp_path: Path) -> None:
    cached = (len(PROMPT) - 1) // BLOCK * BLOCK
    async with pair(tmp_path) as (_, agent):
        await agent.complete(PROMPT)
        for asks, wants in itertools.product((True, False), (None, True, False)):
            fields = {} if wants is None else {"stream_options": {"include_usage": wants}}
            answer = await agent.complete(PROMPT, {"x-fairlead-usage": "1"} if asks else None, stream=True, **fields)
            events = answer.text.split("\n\n")
            assert (f": usage {len(PROMPT)} 4 {cached}" in events) == asks
            assert any('"usage"' in event for event in events) == bool(wants)
            assert events[-2:] == ["data: [DONE]", ""] and sum('"text"' in event for event in events) == 4


async def test_token_ids_of_the_router_do_not_reach_the_engine(tmp_path: Path) -> None:
    tokens = PromptEncoder(FORMAT).encode_text(PROMPT)
    body = token_bytes(tokens) + json.dumps({"model": "stand-in", "prompt": PROMPT}).encode()
    async with pair(tmp_path) as (engine, agent):
        answer = await agent.client.post("/v1/completions", content=body, headers={"x-fairlead-prompt-tokens": str(len(tokens))})
        assert answer.status_code == 200
        assert engine.bodies == [{"model": "stand-in", "prompt": PROMPT}]
        answer = await agent.client.post("/v1/completions", content=body, headers={"x-fairlead-prompt-tokens": "99999"})
        assert answer.status_code == 400
        assert "X-Fairlead-Prompt-Tokens" in answer.json()["error"]["message"]


async def test_salts_keep_caches_apart(tmp_path: Path) -> None:
    async with pair(tmp_path) as (engine, agent):
        await agent.complete(PROMPT)
        first = await agent.complete(PROMPT, {"x-fairlead-cache-salt": "ab" * 16}, cache_salt="client's own")
        assert engine.bodies[-1]["cache_salt"] == "ab" * 16
        assert first.headers["x-fairlead-cached-tokens"] == "0"
        await agent.complete(PROMPT, cache_salt="mine")
        assert engine.bodies[-1]["cache_salt"] == cache_salt(b"", "", "mine"), "without a router, as our worker derives it"
        assert (await agent.complete(PROMPT, {"x-fairlead-cache-salt": "not hex"})).status_code == 400
        refused = await agent.client.post("/v1/messages", json={"model": "stand-in"}, headers={"x-fairlead-cache-salt": "ab"})
        assert refused.status_code == 501
        assert "cache salt" in refused.json()["error"]["message"]


async def test_embeddings_get_their_salt_and_priority(tmp_path: Path) -> None:
    async with pair(tmp_path) as (engine, agent):
        headers = {"x-fairlead-cache-salt": "ab" * 16, "x-fairlead-priority": "-3"}
        answer = await agent.client.post("/v1/embeddings", json={"model": "stand-in", "input": PROMPT}, headers=headers)
        assert answer.status_code == 200
        assert (engine.bodies[-1]["cache_salt"], engine.bodies[-1]["priority"]) == ("ab" * 16, -3)


async def test_salts_go_where_the_engine_s_own_document_has_the_field(tmp_path: Path) -> None:
    events, replay = f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay"
    engine = StandInEngine(events, replay)
    engine.openapi = openapi({"/v1/completions": ["prompt", "cache_salt"], "/v1/embeddings": ["input"], "/v1/messages": ["cache_salt"]})
    await engine.start()
    headers = {"x-fairlead-cache-salt": "ab" * 16, "x-fairlead-priority": "4"}
    try:
        async with running_agent(tmp_path, engine.url, events, replay) as agent:
            await agent.ready()
            assert (await agent.complete(PROMPT, headers)).status_code == 200
            assert engine.bodies[-1]["cache_salt"] == "ab" * 16 and "priority" not in engine.bodies[-1]
            refused = await agent.client.post("/v1/embeddings", json={"model": "stand-in", "input": PROMPT}, headers=headers)
            assert (refused.status_code, refused.headers["x-fairlead-retry"]) == (501, "other")
            assert "/v1/embeddings takes no cache salt" in refused.json()["error"]["message"]
            passed = await agent.client.post("/v1/messages", json={"model": "stand-in"}, headers=headers)
            assert "does not serve POST /v1/messages" in passed.json()["error"]["message"], "the engine was asked"
    finally:
        await engine.stop()


def openapi(fields: dict[str, list[str]]) -> dict:
    """Return a document as FastAPI's, with each body behind a reference and its alternatives."""
    schemas = {f"Body{number}": {"properties": {name: {} for name in names}} for number, names in enumerate(fields.values())}
    schemas["Other"] = {"properties": {"cache_salt": {}, "prompt": {}, "input": {}}}
    paths = {}
    for number, path in enumerate(fields):
        schema = {"anyOf": [{"$ref": f"#/components/schemas/Body{number}"}, {"$ref": "#/components/schemas/Other"}]}
        paths[path] = {"post": {"requestBody": {"content": {"application/json": {"schema": schema}}}}, "get": {}}
    return {"paths": paths | {"/health": {"get": {}}}, "components": {"schemas": schemas}}


async def test_sglang_refuses_salts(tmp_path: Path) -> None:
    async with pair(tmp_path, runtime="sglang") as (_, agent):
        answer = await agent.complete(PROMPT, {"x-fairlead-cache-salt": "ab"})
        assert (answer.status_code, answer.headers["x-fairlead-retry"]) == (501, "other"), "another engine may serve it"
        assert "SGLang" in answer.json()["error"]["message"]


async def test_a_body_that_only_the_engine_could_read_does_not_lose_its_salt(tmp_path: Path) -> None:
    """Python's JSON reads NaN, lone surrogates and UTF-16."""
    async with pair(tmp_path) as (engine, agent):
        body = json.dumps({"model": "stand-in", "prompt": PROMPT, "cache_salt": "of another tenant"})
        for data in (body[:-1].encode() + b', "top_p": NaN}', body[:-1].encode() + b', "user": "\\ud800"}', body.encode("utf-16")):
            assert json.loads(data)
            answer = await agent.client.post("/v1/completions", content=data, headers={"x-fairlead-cache-salt": "ab" * 16})
            assert answer.status_code == 400
            assert "not a JSON object in UTF-8" in answer.json()["error"]["message"]
        assert not engine.bodies


async def test_a_client_cannot_make_the_engine_report_reused_blocks_as_new(tmp_path: Path) -> None:
    async with pair(tmp_path) as (engine, agent):
        await agent.complete(PROMPT, vllm_xargs={"kv_cache_report_mode": "full", "other": 1})
        assert engine.bodies[-1]["vllm_xargs"] == {"other": 1}
        escaped = json.dumps({"model": "stand-in", "prompt": PROMPT, "vllm_xargs": {"mode": 1}}).replace(
            "mode", "kv_cache_report\\u005fmode"
        )
        await agent.client.post("/v1/completions", content=escaped)
        assert engine.bodies[-1]["vllm_xargs"] == {}


async def test_a_client_is_not_more_urgent_than_its_key(tmp_path: Path) -> None:
    async with pair(tmp_path) as (engine, agent):
        for headers, fields, priority in (
            ({"x-fairlead-priority": "5"}, {"priority": -9}, 5),
            ({}, {"priority": -9}, -9),
            ({"x-fairlead-priority": "5"}, {}, 5),
            ({"x-fairlead-priority": "0"}, {}, None),
            ({"x-fairlead-priority": "5", "X-Vllm-Priority": "-9"}, {}, 5),
            ({"x-fairlead-priority": "0", "X-Vllm-Priority": "-9"}, {}, None),
        ):
            await agent.complete(PROMPT, headers, **fields)
            assert engine.bodies[-1].get("priority") == priority
            by_header = {name.lower(): value for name, value in engine.headers[-1].items()}.get("x-vllm-priority")
            assert by_header == headers.get("x-fairlead-priority"), "vLLM takes the header before the body"


async def test_the_engine_gets_the_body_as_it_is(tmp_path: Path) -> None:
    """The agent has decompressed it, and has answered `Expect`."""
    body = json.dumps({"model": "stand-in", "prompt": PROMPT}).encode()
    async with pair(tmp_path) as (engine, agent):
        for coding, data in (("gzip", gzip.compress(body)), ("deflate", zlib.compress(body)), ("identity", body)):
            answer = await agent.client.post(
                "/v1/completions", content=data, headers={"content-encoding": coding, "expect": "100-continue"}
            )
            assert answer.status_code == 200
            assert not {"content-encoding", "expect"} & {name.lower() for name in engine.headers[-1]}
            assert engine.bodies[-1]["prompt"] == PROMPT


async def test_what_would_make_the_engine_connect_elsewhere_is_refused(tmp_path: Path) -> None:
    chat = {"model": "stand-in", "messages": [{"role": "user", "content": [{"image_url": "http://10.0.0.1/x"}]}]}
    transfer = {"model": "stand-in", "prompt": PROMPT, "kv_transfer_params": {"remote_host": "10.0.0.1"}}
    cases = [("/v1/chat/completions", chat), ("/tokenize", chat), ("/v1/completions", transfer), ("/v1/embeddings", transfer)]
    async with pair(tmp_path) as (engine, agent):
        for path, body in cases:
            refused = await agent.client.post(path, json=body)
            assert refused.status_code == 400 and "--allowed-remotes" in refused.json()["error"]["message"], path
        for encoding in ("utf-16", "utf-32"):
            refused = await agent.client.post("/tokenize", content=json.dumps(chat).encode(encoding))
            assert refused.status_code == 400, "engines decode it, so it would pass unchecked"
        assert not engine.bodies
    async with pair(tmp_path / "open", allowed_remotes="kv_transfer_params") as (engine, agent):
        assert (await agent.client.post("/v1/completions", json=transfer)).status_code == 200
        assert engine.bodies[0]["kv_transfer_params"] == transfer["kv_transfer_params"]


async def test_a_body_with_too_many_nodes_does_not_reach_the_engine(tmp_path: Path) -> None:
    async with pair(tmp_path) as (engine, agent):
        for kind, bomb in BOMBS.items():
            answer = await agent.client.post("/v1/completions", content=bomb)
            assert answer.status_code == 400 and "the body is too large to decode" in answer.json()["error"]["message"], kind
        assert not engine.bodies


async def test_a_body_that_is_not_utf_8_is_refused_wherever_that_is(tmp_path: Path) -> None:
    fields = (b"prompt", b"model", b"cache_salt", b"stream_options", b"vllm_xargs", b"\xff")
    values = (b'"\xff"', b'"\\ud800"', b'{"\xff":1}', b'{"a":"\\ud800"}')
    async with pair(tmp_path) as (engine, agent):
        for field, value in itertools.product(fields, values):
            body = b'{"stream":true,"' + field + b'":' + value + b"}"
            answer = await agent.client.post("/v1/completions", content=body, headers={"x-fairlead-usage": "1"})
            assert answer.status_code == 400 and "JSON" in answer.json()["error"]["message"], body
        assert not engine.bodies


async def test_a_target_that_is_no_path_is_refused(tmp_path: Path) -> None:
    async with pair(tmp_path) as (_, agent):
        reader, writer = await asyncio.open_connection("127.0.0.1", agent.port)
        writer.write(b"GET http://elsewhere/version HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")
        assert (await asyncio.wait_for(reader.read(), 30)).startswith(b"HTTP/1.1 400 ")
        writer.close()


async def test_a_path_that_the_engine_lacks_is_501_with_its_name(tmp_path: Path) -> None:
    async with pair(tmp_path) as (_, agent):
        answer = await agent.client.post("/v1/messages", json={"model": "stand-in", "messages": []})
        assert (answer.status_code, answer.headers["x-fairlead-retry"]) == (501, "path")
        assert answer.json()["error"]["message"] == "vLLM does not serve POST /v1/messages"


async def test_a_client_that_leaves_cancels_its_request_in_the_engine(tmp_path: Path) -> None:
    async with pair(tmp_path) as (engine, agent):
        engine.release.clear()
        async with agent.client.stream("POST", "/v1/completions", json={"model": "stand-in", "prompt": PROMPT, "stream": True}) as answer:
            await anext(answer.aiter_bytes())
        await eventually(lambda: engine.cancelled == 1)
        await eventually(lambda: agent.agent.in_flight == 0)


async def test_routers_get_a_worker_s_documents(tmp_path: Path) -> None:
    async with pair(tmp_path, canary="r2") as (_, agent):
        ready = (await agent.client.get("/ready")).json()
        assert (ready["ready"], ready["phase"], ready["runtime"]) == (True, "ready", "vllm")
        load = (await agent.client.get("/load")).json()
        assert load["pod"] == "pod-0"
        assert load["canary"] == "r2"
        assert load["waiting"] == 3
        assert load["pages_free"] == 150
        assert load["page_size"] == BLOCK
        assert load["adapters"]["sql"]["parent"] == "stand-in"
        answer = await agent.client.get("/internal/prompt-format")
        format = msgspec.json.decode(answer.content, type=PromptFormat)
        assert (format.block_tokens, format.model_names, format.max_model_len) == (BLOCK, ["stand-in"], 4096)
        raw = await agent.client.get("/internal/prompt-format", headers={"accept-encoding": "identity"})
        assert raw.content == answer.content
        assert gzip.decompress(gzip.compress(raw.content)) == answer.content
        again = await agent.client.get("/internal/prompt-format", headers={"if-none-match": answer.headers["etag"]})
        assert again.status_code == 304
        metrics = (await agent.client.get("/metrics")).text
        assert 'vllm:num_requests_waiting{engine="0",model_name="stand-in"} 3.0' in metrics
        assert 'fairlead_num_requests_waiting{engine="0",model_name="stand-in"} 3.0' in metrics
        assert "fairlead_engine_ready 1.0" in metrics


async def test_an_admin_port_takes_the_paths_that_are_not_for_clients(tmp_path: Path) -> None:
    admin = free_port()
    async with pair(tmp_path, admin_port=admin) as (engine, agent):
        url = f"http://127.0.0.1:{admin}"
        for path in ("/load", "/metrics", "/internal/prompt-format", "/engine/health", "/ready", "/health"):
            assert (await agent.client.get(url + path)).status_code == 200, path
        for path in ("/load", "/metrics", "/internal/prompt-format", "/internal/drain", "/engine/health", "/reset_prefix_cache", "/docs"):
            assert (await agent.client.get(path)).status_code == 404, path
        assert (await agent.complete(PROMPT)).status_code == 200
        body = {"model": "stand-in", "prompt": PROMPT}
        assert (await agent.client.post(f"{url}/v1/completions", json=body)).status_code == 404
        for port in (url, ""):
            assert len((await agent.client.post(f"{port}/tokenize", json=body)).json()["tokens"]) == len(PROMPT)
        await engine.stop()
        await eventually(lambda: agent.agent.phase == "starting")
        assert (await agent.client.get("/health")).status_code == 503
        for path in ("/health", "/engine/health"):
            assert (await agent.client.get(url + path)).status_code == 200, "a missing engine is no reason to restart the agent"
        await engine.start()


PAGE_OF_ANOTHER = {"origin": "https://evil.example"}


async def test_no_get_and_no_web_page_drains(tmp_path: Path) -> None:
    async with pair(tmp_path) as (_, agent):
        for method in ("GET", "HEAD", "PUT", "DELETE", "OPTIONS"):
            refused = await agent.client.request(method, "/internal/drain")
            assert (refused.status_code, refused.headers["allow"]) == (405, "POST")
        for origin in ("https://evil.example", "null", "http://rebound.example"):
            for path in ADMIN:
                headers = {"origin": origin, "host": "rebound.example"}
                assert (await agent.client.post(path, headers=headers)).status_code == 403, path
                assert (await agent.client.get(path, headers=headers)).status_code == 403, path
        assert not agent.agent.drain_requested.is_set()


async def test_where_clients_reach_the_port_the_engine_gets_inference_only(tmp_path: Path) -> None:
    others = ("/docs", "/openapi.json", "/reset_prefix_cache", "/sleep", "/v1/load_lora_adapter", "/flush_cache", "/internal/x", "/")
    spelled = ("/v1/%63ompletions", "/v1/models/../../sleep", "//sleep", "/v1//completions")
    async with pair(tmp_path) as (engine, agent):
        engine.unserved.clear()
        for path in (*others, *spelled):
            for method in ("GET", "POST"):
                assert (await raw(agent.port, f"{method} {path} HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n")) in (404, 400), path
        assert not engine.unserved and not engine.headers
        assert (await agent.client.get("/v1/models")).status_code == 200


async def test_the_admin_port_forwards_no_get_that_may_change_the_engine(tmp_path: Path) -> None:
    async with pair(tmp_path, admin_port=free_port()) as (_, agent):
        url = f"http://127.0.0.1:{agent.agent.config.admin_port}"
        assert (await agent.client.get(f"{url}/flush_cache")).status_code == 404
        assert (await agent.client.post(f"{url}/flush_cache", headers=PAGE_OF_ANOTHER)).status_code == 403
        for method, path in (("POST", "/flush_cache"), ("GET", "/docs"), ("POST", "/v1/load_lora_adapter")):
            unknown = await agent.client.request(method, url + path)
            assert unknown.status_code == 404 and "does not serve" not in unknown.text, "the engine itself has no such path"


async def test_a_head_that_two_servers_may_read_differently_is_refused(tmp_path: Path) -> None:
    async with running_agent(tmp_path, "http://127.0.0.1:9") as agent:
        for head in (
            "GET /health HTTP/1.1",
            "GET /health HTTP/1.1\r\nhost: x\r\nhost: x",
            "GET /health HTTP/1.1\r\nhost: x\r\nauthorization: a\r\nauthorization: b",
            "GET /health HTTP/1.1\r\nhost: x\r\ncontent-encoding: gzip\r\ncontent-encoding: identity",
            "GET /health HTTP/2.0\r\nhost: x",
            "GET /health HTTP/0.9\r\nhost: x",
        ):
            assert await raw(agent.port, f"{head}\r\n\r\n") == 400, head


async def raw(port: int, data: str) -> int:
    """Return the status of a request that is sent as it is."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data.encode())
    line = await reader.readline()
    writer.close()
    return int(line.split()[1])
