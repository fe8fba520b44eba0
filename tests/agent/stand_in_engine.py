"""A server with vLLM's HTTP and KV events and a model of its cache, without a model: in this process, or as a program to kill."""

import argparse
import asyncio
import json
import sys
from pathlib import Path

import msgspec
from aiohttp import web
from tests.agent.kv.engine_pool import BLOCK, Pool
from tests.agent.kv.publisher import Publisher
from tests.router.prompt_format import make_format

from fairlead_common.prompts.encoder import PromptEncoder

MODEL = "stand-in"
FORMAT = make_format()
METRICS = """# HELP vllm:num_requests_running Running.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{engine="0",model_name="stand-in"}} {running}
# HELP vllm:num_requests_waiting Waiting.
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{{engine="0",model_name="stand-in"}} 3.0
# HELP vllm:kv_cache_usage_perc Usage.
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{{engine="0",model_name="stand-in"}} 0.25
# HELP vllm:prompt_tokens_total Prompt tokens.
# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total{{engine="0",model_name="stand-in"}} {prompt}
# HELP vllm:prefix_cache_hits_total Hits.
# TYPE vllm:prefix_cache_hits_total counter
vllm:prefix_cache_hits_total{{engine="0",model_name="stand-in"}} {cached}
# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{{block_size="{block}",cache_dtype="auto",engine="0",num_gpu_blocks="{blocks}"}} 1.0
"""


def write_model(folder: Path) -> Path:
    """Write the tokenizer's files of the stand-in's model."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(FORMAT.tokenizer_json)
    (folder / "chat_template.jinja").write_text(FORMAT.chat_template)
    (folder / "config.json").write_text("{}")
    return folder


class StandInEngine:
    """`blocks`: size of the cache. Requests take `seconds`, in which a stream sends four tokens."""

    def __init__(self, events: str, replay: str, *, blocks: int = 200, port: int = 0, model: str = MODEL) -> None:
        self.pool, self.model = Pool(blocks), model
        self.events, self.replay, self.blocks, self.port = events, replay, blocks, port
        self.bodies: list[dict] = []
        self.headers: list[dict[str, str]] = []
        self.cancelled = 0
        self.extra_token = ""
        """Tokenize otherwise than the files say: `all` prompts, or each `chat`."""
        self.is_dead = False
        """Answer as vLLM's API process does after its engine process has ended."""
        self.asks_for_key = False
        """Answer 401, as vLLM does with `VLLM_API_KEY`."""
        self.computes = asyncio.Event()
        """Requests wait for it before their prompt is computed."""
        self.computes.set()
        self.refuses = False
        """Answer 400 to requests that were waiting."""
        self.unserved: list[str] = []
        """Requests for paths that it does not have."""
        self.openapi: dict = {}
        """The document at /openapi.json; empty: there is none."""
        self.release = asyncio.Event()
        self.release.set()
        self.adapters = ["sql"]
        self._running = self._prompt = self._cached = 0
        self._transports: set[asyncio.Transport] = set()
        self._encoder = PromptEncoder(FORMAT)

    async def start(self) -> "StandInEngine":
        self.publisher = Publisher(self.events, self.replay)
        self._replaying = asyncio.create_task(self.publisher.serve_replay())
        app = web.Application()
        app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/metrics", self._metrics),
                web.get("/v1/models", self._models),
                web.post("/tokenize", self._tokenize),
                web.post("/v1/completions", self._complete),
                web.post("/v1/chat/completions", self._complete),
                web.post("/v1/embeddings", self._embed),
            ]
        )
        app.router.add_route("*", "/{path:.*}", self._unknown)
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()
        self.port = self._runner.addresses[0][1]
        return self

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def stop(self) -> None:
        """End as a killed process does: connections break."""
        for transport in self._transports:
            transport.abort()
        await self._runner.cleanup()
        self._replaying.cancel()
        await asyncio.gather(self._replaying, return_exceptions=True)
        self.publisher.kill()

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _unknown(self, request: web.Request) -> web.Response:
        self.unserved.append(f"{request.method} {request.path}")
        if request.path == "/openapi.json" and self.openapi:
            return web.json_response(self.openapi)
        return web.json_response({"detail": "Not Found"}, status=404, dumps=lambda value: json.dumps(value, separators=(",", ":")))

    async def _metrics(self, request: web.Request) -> web.Response:
        text = METRICS.format(running=self._running, prompt=self._prompt, cached=self._cached, block=BLOCK, blocks=self.blocks)
        return web.Response(text=text)

    async def _models(self, request: web.Request) -> web.Response:
        if self.asks_for_key:
            return web.json_response({"error": "Unauthorized"}, status=401)
        base = {"id": self.model, "root": "/model", "parent": None, "max_model_len": 4096}
        adapters = [{"id": name, "root": f"/adapters/{name}", "parent": self.model} for name in self.adapters]
        return web.json_response({"object": "list", "data": [base, *adapters]})

    async def _tokenize(self, request: web.Request) -> web.Response:
        return web.json_response({"tokens": self._tokens(await request.json())})

    def _tokens(self, body: dict) -> list[int]:
        messages = body.get("messages")
        tokens = self._encoder.encode_chat(messages) if messages else self._encoder.encode_text(body["prompt"])
        return [*tokens, *([0] if self.extra_token == "all" or (self.extra_token == "chat" and messages) else [])]

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        if self.is_dead:
            message = "EngineCore encountered an issue. See stack trace (above) for the root cause."
            document = {"error": {"message": message, "type": "InternalServerError", "code": 500}}
            if not (await request.json()).get("stream"):
                return web.json_response(document, status=500)
            text = f"data: {json.dumps(document)}\n\ndata: [DONE]\n\n"
            return web.Response(text=text, headers={"content-type": "text/event-stream; charset=utf-8"})
        body = await request.json()
        assert isinstance(request.transport, asyncio.Transport)
        self._transports.add(request.transport)
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        await self.computes.wait()
        if self.refuses:
            return web.json_response({"error": {"message": "refused", "type": "BadRequestError", "code": 400}}, status=400)
        tokens = self._tokens(body)
        adapter = body["model"] if body.get("model") != self.model else ""
        salt = body.get("cache_salt") or ""
        cached = self.pool.cached_blocks(tokens[:-1], adapter, salt) * BLOCK
        blocks = self.pool.start(tokens, adapter, salt)
        await self.publisher.publish(self.pool.take_events())
        self._running += 1
        self._prompt, self._cached = self._prompt + len(tokens), self._cached + cached
        usage = {"prompt_tokens": len(tokens), "completion_tokens": 4, "total_tokens": len(tokens) + 4}
        usage["prompt_tokens_details"] = {"cached_tokens": cached}
        try:
            if body.get("stream"):
                return await self._stream(request, body, usage)
            await self.release.wait()
            return web.json_response({"object": "text_completion", "choices": [{"index": 0, "text": " 0 1 2 3"}], "usage": usage})
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self._running -= 1
            self.pool.finish(blocks)

    async def _embed(self, request: web.Request) -> web.Response:
        self.bodies.append(await request.json())
        self.headers.append(dict(request.headers))
        return web.json_response({"object": "list", "data": [], "usage": {"prompt_tokens": 3, "total_tokens": 3}})

    async def _stream(self, request: web.Request, body: dict, usage: dict) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
        await answer.prepare(request)
        for number in range(4):
            await answer.write(b"data: " + msgspec.json.encode({"choices": [{"index": 0, "text": f" {number}"}]}) + b"\n\n")
            if number == 1:
                await self.release.wait()
        if (body.get("stream_options") or {}).get("include_usage"):
            await answer.write(b"data: " + msgspec.json.encode({"choices": [], "usage": usage}) + b"\n\n")
        await answer.write(b"data: [DONE]\n\n")
        await answer.write_eof()
        return answer


async def _run() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int)
    parser.add_argument("--served-model-name", default=MODEL)
    parser.add_argument("--kv-events-config", type=json.loads)
    options, _ = parser.parse_known_args()
    config = options.kv_events_config
    await StandInEngine(config["endpoint"], config["replay_endpoint"], port=options.port, model=options.served_model_name).start()
    await asyncio.Event().wait()


def command(port: int, events: str, replay: str) -> list[str]:
    """Return the command line of a stand-in as a process, with vLLM's flags."""
    config = json.dumps({"endpoint": events, "replay_endpoint": replay})
    return [sys.executable, "-m", "tests.agent.stand_in_engine", "serve", "--port", str(port), "--kv-events-config", config]


if __name__ == "__main__":
    asyncio.run(_run())
