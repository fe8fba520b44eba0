"""The benchmark's figures against a stand-in server with known delays."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from xml.etree import ElementTree

import pytest
import typer
from aiohttp import web

from fairlead.bench.client import Outcome
from fairlead.bench.command import serve
from fairlead.bench.datasets import TRACE_BLOCK, Prompt, prefix_repetition_prompts, random_prompts, trace_prompts
from fairlead.bench.load import schedule_arrivals
from fairlead.bench.options import BenchOptions
from fairlead.bench.report import compute_figures, percentile
from fairlead.errors import UserError
from fairlead.options import takes
from fairlead.program import new_app

TTFT, ITL, TOKENS = 0.12, 0.03, 6
WORDS = range(10, 500)

# The field names of vllm/benchmarks/serve.py that comparisons read.
VLLM_FIELDS = {
    *(
        "date",
        "endpoint_type",
        "backend",
        "label",
        "model_id",
        "tokenizer_id",
        "num_prompts",
        "request_rate",
        "burstiness",
        "max_concurrency",
    ),
    *("duration", "completed", "failed", "total_input_tokens", "total_output_tokens", "request_throughput", "request_goodput"),
    *("output_throughput", "total_token_throughput", "max_output_tokens_per_s", "max_concurrent_requests"),
    *(f"{kind}_{name}_ms" for kind in ("mean", "median", "std", "p50", "p95", "p99") for name in ("ttft", "tpot", "itl", "e2el")),
}


class StandIn:
    """Streams `TOKENS` tokens with known delays; refuses prompts that begin with token 13; counts concurrent requests."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, object]] = []
        self.keys: list[str] = []
        self.now = self.peak = 0
        self.line_end = "\n"

    def app(self) -> web.Application:
        app = web.Application(client_max_size=1 << 24)
        app.router.add_get("/v1/models", self.models)
        app.router.add_post("/tokenize", self.tokenize)
        app.router.add_post("/detokenize", self.detokenize)
        app.router.add_post("/v1/completions", self.completions)
        app.router.add_post("/v1/chat/completions", self.chat)
        return app

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "stand-in"}]})

    async def tokenize(self, _: web.Request) -> web.Response:
        return web.json_response({"tokens": list(WORDS)})

    async def detokenize(self, request: web.Request) -> web.Response:
        return web.json_response({"prompt": " ".join(str(token) for token in (await request.json())["tokens"])})

    async def chat(self, request: web.Request) -> web.StreamResponse:
        self.keys.append(request.headers.get("Authorization", ""))
        self.bodies.append(await request.json())
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        deltas = [{"role": "assistant", "content": ""}, *({"content": "x"} for _ in range(TOKENS))]
        for delta in deltas:
            await response.write(f"data: {json.dumps({'choices': [{'delta': delta}]})}\n\n".encode())
        usage = {"prompt_tokens": 7, "completion_tokens": TOKENS}
        await response.write(f"data: {json.dumps({'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n".encode())
        return response

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        if body["prompt"][0] == 13:
            return web.json_response({"error": {"message": "unlucky"}}, status=400)
        self.now += 1
        self.peak = max(self.peak, self.now)
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "X-Fairlead-Pod": "pod-1", "X-Fairlead-Predicted-Tokens": "16"}
        )
        await asyncio.sleep(TTFT)
        await response.prepare(request)
        for number in range(TOKENS):
            if number:
                await asyncio.sleep(ITL)
            # Split in the middle of an event: the client must join the parts.
            data = f"data: {json.dumps({'choices': [{'text': 'x'}]})}{2 * self.line_end}".encode()
            await response.write(data[:7])
            await response.write(data[7:])
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": TOKENS, "prompt_tokens_details": {"cached_tokens": 16}}
        for last in (json.dumps({"choices": [], "usage": usage}), "[DONE]"):
            await response.write(f"data: {last}{2 * self.line_end}".encode())
        self.now -= 1
        return response


@pytest.fixture
async def server() -> AsyncIterator[tuple[str, StandIn]]:
    stand_in = StandIn()
    runner = web.AppRunner(stand_in.app())
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}", stand_in
    await runner.cleanup()


def parse(*flags: str) -> BenchOptions:
    """Return the options of a command line."""
    app, parsed = new_app(), list[BenchOptions]()
    app.command()(takes(BenchOptions)(lambda options: parsed.append(options) or 0))  # type: ignore[func-returns-value]
    typer.main.get_command(app).main(list(flags), standalone_mode=False)
    return parsed[0]


async def bench(url: str, *flags: str) -> dict[str, object]:
    from rich.console import Console

    return await serve(parse("--base-url", url, *flags), Console(quiet=True))


async def test_a_chat_with_a_key_sends_messages_and_its_report_is_one_file(server: tuple[str, StandIn], tmp_path: Path) -> None:
    url, stand_in = server
    key, report = tmp_path / "key", tmp_path / "report.html"
    key.write_text("secret\n")
    flags = ("--num-prompts", "4", "--random-input-len", "8", "--random-output-len", str(TOKENS), "--request-rate", "200")
    result = await bench(url, "--backend", "openai-chat", *flags, "--api-key-file", str(key), "--html", str(report))
    assert result["completed"] == 4 and stand_in.keys == ["Bearer secret"] * 4
    assert all(isinstance(body["messages"], list) and "prompt" not in body for body in stand_in.bodies)
    assert [len(gaps) for gaps in result["itls"]] == [TOKENS - 1] * 4, "the event of the role is no token"  # type: ignore[attr-defined]
    document = report.read_text()
    assert document.count("<svg") == 5 and "<script" not in document and "src=" not in document and "href=" not in document
    ElementTree.fromstring(document[document.index("<svg") : document.index("</svg>") + 6])


async def test_measured_times_match_the_servers_delays_and_fields_match_vllms(server: tuple[str, StandIn], tmp_path: Path) -> None:
    url, stand_in = server
    file = tmp_path / "result.json"
    flags = ("--num-prompts", "8", "--random-input-len", "64", "--random-output-len", str(TOKENS), "--max-concurrency", "4", "--ignore-eos")
    await bench(url, *flags, "--save-result", str(file))
    result = json.loads(file.read_text())
    assert set(result) >= VLLM_FIELDS
    assert result["completed"] == 8 and result["failed"] == 0
    assert result["median_ttft_ms"] == pytest.approx(1000 * TTFT, rel=0.5)
    assert result["median_itl_ms"] == pytest.approx(1000 * ITL, rel=0.5)
    assert result["median_tpot_ms"] == pytest.approx(1000 * ITL, rel=0.5)
    assert result["mean_e2el_ms"] == pytest.approx(result["mean_ttft_ms"] + (TOKENS - 1) * result["mean_tpot_ms"], rel=0.01)
    assert (result["total_input_tokens"], result["total_output_tokens"], result["total_cached_tokens"]) == (8 * 64, 8 * TOKENS, 8 * 16)
    assert result["cached_fraction"] == 0.25
    assert stand_in.peak == 4 and result["max_concurrent_requests"] <= 4
    assert all(body["ignore_eos"] is True and body["max_tokens"] == TOKENS and body["stream"] is True for body in stand_in.bodies)


async def test_failures_are_counted_and_excluded_from_the_times(server: tuple[str, StandIn]) -> None:
    url, _ = server
    result = await bench(
        url, "--num-prompts", "3", "--random-input-len", "4", "--vocab-size", "14", "--seed", "5", "--random-prefix-len", "0"
    )
    failed = [error for error in result["errors"] if error]  # type: ignore[attr-defined]  # a list in the result
    assert result["completed"] + result["failed"] == 3  # type: ignore[operator]  # two numbers
    assert len(failed) == result["failed"] and all("unlucky" in error for error in failed)
    nobody = await bench(url, "--num-prompts", "2", "--random-input-len", "1", "--model", "m", "--vocab-size", "14", "--timeout", "0.01")
    assert nobody["completed"] == 0 and nobody["median_ttft_ms"] == 0.0


async def test_text_prompts_come_from_the_servers_own_detokenizer(server: tuple[str, StandIn]) -> None:
    url, stand_in = server
    await bench(url, "--num-prompts", "1", "--random-input-len", "3", "--prompt-format", "text")
    assert isinstance(stand_in.bodies[0]["prompt"], str) and len(stand_in.bodies[0]["prompt"].split()) == 3


async def test_events_that_end_with_carriage_returns_are_read(server: tuple[str, StandIn]) -> None:
    url, stand_in = server
    stand_in.line_end = "\r\n"
    result = await bench(url, "--num-prompts", "1", "--random-input-len", "3")
    assert (result["completed"], result["total_output_tokens"]) == (1, TOKENS)


async def test_an_unreachable_server_is_named() -> None:
    with pytest.raises(UserError, match=r"127\.0\.0\.1:9.*--base-url"):
        await bench("http://127.0.0.1:9")


def test_prompts_are_seeded_and_share_the_requested_prefix(tmp_path: Path) -> None:
    one = random_prompts(WORDS, count=4, input_len=32, output_len=8, range_ratio=0.5, prefix_len=4, seed=1)
    assert one == random_prompts(WORDS, count=4, input_len=32, output_len=8, range_ratio=0.5, prefix_len=4, seed=1)
    assert len({prompt.tokens[:4] for prompt in one}) == 1 and len({prompt.tokens[4:] for prompt in one}) == 4
    assert all(20 <= len(prompt.tokens) <= 52 for prompt in one)
    repeated = prefix_repetition_prompts(WORDS, count=12, prefix_len=16, suffix_len=4, prefixes=3, output_len=5, seed=1)
    assert len({prompt.tokens[:16] for prompt in repeated}) == 3 and len({prompt.tokens for prompt in repeated}) == 12
    trace = tmp_path / "trace.jsonl"
    entries = [
        {"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2]},
        {"timestamp": 3000, "input_length": 1500, "output_length": 7, "hash_ids": [0, 1, 3]},
    ]
    trace.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    first, second = trace_prompts(WORDS, trace, count=10, speed=2, scale=1, seed=0)
    assert (len(first.tokens), len(second.tokens), second.at) == (1100, 1500, 1.5)
    assert first.tokens[: 2 * TRACE_BLOCK] == second.tokens[: 2 * TRACE_BLOCK] and first.tokens[1024:1100] != second.tokens[1024:1100]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"{}\n", "line 1: not a Mooncake trace entry"),
        (b'{"timestamp": 0, "input_length": 1e999, "output_length": 5, "hash_ids": []}\n', "line 1: not a Mooncake trace entry"),
        (b"\x80\xff", "not a text file"),
        (b"", "contains no request"),
    ],
    ids=["no fields", "infinite length", "binary", "empty"],
)
def test_an_invalid_trace_is_refused_with_its_line(tmp_path: Path, content: bytes, expected: str) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_bytes(content)
    with pytest.raises(UserError, match=f"--trace-path {trace}.*{expected}"):
        trace_prompts(WORDS, trace, count=1, speed=1, scale=1, seed=0)


def test_arrivals_keep_the_rate_and_a_traces_own_times() -> None:
    prompts = [Prompt((1,), 1)] * 50
    times = schedule_arrivals(prompts, rate=10, burstiness=1, seed=3)
    assert times[-1] == pytest.approx(5.0) and times == sorted(times)
    assert schedule_arrivals([Prompt((1,), 1, 2.5)], rate=1, burstiness=1, seed=0) == [2.5]
    assert schedule_arrivals(prompts, rate=float("inf"), burstiness=1, seed=0) == [0.0] * 50


def test_percentiles_interpolate_as_numpy_does() -> None:
    import numpy

    values = [0.4, 0.1, 0.9, 0.35, 0.2]
    for percent in (0, 50, 95, 99, 100):
        assert percentile(values, percent) == pytest.approx(float(numpy.percentile(values, percent)))
    assert percentile([], 99) == 0.0


def test_the_peak_of_concurrent_requests_counts_a_departure_before_a_simultaneous_arrival() -> None:
    start = time.perf_counter()
    outcomes = [Outcome(1, started=start + n, ttft=0.5, latency=1.0, output_tokens=1) for n in range(3)]
    assert compute_figures(outcomes, 3.0)["max_concurrent_requests"] == 1


@pytest.mark.parametrize(
    "wrong",
    [
        ["--max-concurrency", "0"],
        ["--max-concurrency", "-1"],
        ["--vocab-size", "-1"],
        ["--base-url", "localhost:9"],
        ["--save-result", "/no/such/folder/x.json"],
    ],
)
def test_an_invalid_flag_is_named_before_anything_is_sent(wrong: list[str]) -> None:
    with pytest.raises(UserError, match=f"{wrong[0]} {wrong[1]}: "):
        parse("--base-url", "http://127.0.0.1:9", *wrong).check()
