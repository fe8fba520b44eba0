"""CPU time before the engine: what is counted, who reports it, and what remains of requests without an answer."""

import asyncio
import json
import socket
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import msgspec
import pytest
from tests.worker.api.process import WorkerProcess, until
from tokenizers import Tokenizer

from fairlead_router.request.price import MICROSECONDS_A_TOKEN
from fairlead_worker.api import request_cpu
from fairlead_worker.api.errors import ApiError
from fairlead_worker.api.request_cpu import (
    COUNTED_BYTES,
    HEADER,
    MASK_SECONDS_A_TOKEN,
    MOST_TENANTS,
    MOST_UNREPORTED,
    SECONDS_A_TOKEN,
    RequestCpu,
    UnreportedCpu,
)

ANNA = {"x-fairlead-tenant": "anna"}
ROUNDING = 0.5
"""Milliseconds of a report."""
LARGE, CHUNKED = {b"content-length": b"%d" % COUNTED_BYTES}, {b"transfer-encoding": b"chunked"}


@pytest.fixture
def compute(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """A function that takes so many seconds of the thread's CPU time; nothing else takes any."""
    now = [0.0]
    monkeypatch.setattr(request_cpu, "thread_time", lambda: now[0])

    def compute(seconds: float) -> None:
        now[0] += seconds

    return compute


def reported(cpu: RequestCpu) -> int:
    return sum(int(value) for name, value in cpu.report() if name == HEADER)


async def test_the_steps_of_a_request_are_counted_and_not_those_of_others(compute: Callable[[float], None]) -> None:
    cpu, turn = RequestCpu("anna", UnreportedCpu()), asyncio.Event()

    async def other() -> None:
        compute(0.2)
        turn.set()

    async def work() -> None:
        compute(0.02)
        beside = asyncio.create_task(other())
        await turn.wait()
        await beside
        compute(0.02)
        assert reported(cpu) == 40, "with the step that runs"
        compute(0.2)

    await cpu.count(work(), LARGE)
    assert not cpu.report(), "once"


async def test_errors_and_cancellation_pass_through() -> None:
    cpu = RequestCpu("", UnreportedCpu())
    cleaned = list[str]()

    async def fail() -> None:
        await asyncio.sleep(0)
        raise ValueError

    async def wait() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cleaned.append("up")
            raise

    with pytest.raises(ValueError):
        await cpu.count(fail(), CHUNKED)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await cpu.count(wait(), LARGE)
    assert cleaned == ["up"]


def test_seconds_without_an_answer_are_in_the_tenants_next_one() -> None:
    unreported = UnreportedCpu()
    gone, other, later, small = (RequestCpu(name, unreported) for name in ("anna", "boris", "anna", "anna"))
    gone.add(0.5)
    gone.close()
    gone.add(MOST_UNREPORTED)  # its grammar, whose check goes on
    with pytest.raises(ApiError) as refusal:
        unreported.check("anna")
    assert refusal.value.status == 429
    unreported.check("boris")
    assert not other.report()
    assert reported(later) == 1000 * (MOST_UNREPORTED + 0.5)
    unreported.check("anna")
    small.add(0.0009)
    assert not small.report(), "no ordinary request has the header"
    for number in range(2 * MOST_TENANTS):
        unreported.add(f"tenant-{number}", 1)
    assert len(unreported._seconds) == MOST_TENANTS


def test_tokens_of_the_usage_pay_for_tokenizing_them_and_for_usual_masks() -> None:
    unreported = UnreportedCpu()
    ordinary, truncated, refused, left = (RequestCpu("anna", unreported) for _ in range(4))
    for cpu in (ordinary, truncated, refused, left):
        cpu.add_covered(2000 * SECONDS_A_TOKEN)
    ordinary.tokens, truncated.tokens = 2000, 10
    ordinary.add_masks(50 * MASK_SECONDS_A_TOKEN, 50)
    assert not ordinary.report()
    assert reported(truncated) == reported(refused) == 8
    left.close()
    left.add_computed(3000)
    ordinary.add_masks(1, 500)
    assert unreported.take("anna") == pytest.approx(0.008 + 0.012 + 0.9)


def test_a_block_is_measured_once(compute: Callable[[float], None]) -> None:
    cpu = RequestCpu("anna", UnreportedCpu())

    def load() -> None:
        with cpu.measure():
            compute(0.02)

    cpu.run_step(load)
    load()
    assert reported(cpu) == 40


def test_the_prices_of_worker_and_router_are_equal() -> None:
    assert 1e6 * SECONDS_A_TOKEN == MICROSECONDS_A_TOKEN


def cpu_milliseconds(process: WorkerProcess) -> float:
    """Return the CPU time of the API process, without its children."""
    return sum(int(path.read_text().split()[0]) for path in Path(f"/proc/{process.process.pid}/task").glob("*/schedstat")) / 1e6


def least_milliseconds(work: Callable[[], object]) -> float:
    """Return a fifth of the CPU time of the quickest of five runs here: another process needs more, however busy the machine is."""
    spent = []
    for _ in range(5):
        began = time.thread_time()
        work()
        spent.append(1e3 * (time.thread_time() - began))
    return min(spent) / 5


@pytest.mark.parametrize("is_chunked", [False, True])
def test_a_worker_reports_its_reading_of_a_large_body(shared: WorkerProcess, is_chunked: bool) -> None:
    body = b'{"prompt":"x","max_tokens":1,"metadata":[' + b"[]," * 40_000 + b"0]}"
    began, total = cpu_milliseconds(shared), 0
    for _ in range(10):
        answer = shared.client.post("/v1/completions", content=iter([body]) if is_chunked else body, headers=ANNA)
        assert answer.status_code == 200, answer.text
        total += int(answer.headers["x-fairlead-cpu-ms"])
    used = cpu_milliseconds(shared) - began
    assert 10 * least_milliseconds(lambda: msgspec.json.decode(body)) < total <= used + 10 * ROUNDING


@pytest.mark.parametrize("many", [False, True])
def test_a_worker_reports_its_tokenizing_of_a_prompt_that_is_cut(shared: WorkerProcess, model: Path, many: bool) -> None:
    """A text with special tokens is tokenized in parts, on one core too."""
    text = "".join(f"word {number} and " for number in range(10_000))
    text = "<|im_start|>".join(text[at : at + 2000] for at in range(0, len(text), 2000)) if many else text
    began, total = cpu_milliseconds(shared), 0
    for turn in range(5):  # new ones, because the worker keeps the tokens of parts
        body = {"prompt": f"{turn}".join(text.split(" ")), "max_tokens": 1, "truncate_prompt_tokens": 4}
        answer = shared.client.post("/v1/completions", json=body, headers=ANNA)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["prompt_tokens"] == 4
        total += int(answer.headers["x-fairlead-cpu-ms"])
    used = cpu_milliseconds(shared) - began
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    assert 5 * least_milliseconds(lambda: tokenizer.encode(text)) < total <= used + 5 * ROUNDING


def test_log_probabilities_of_many_tokens_are_reported(shared: WorkerProcess) -> None:
    body = {"prompt": [7] * 1000, "max_tokens": 1, "prompt_logprobs": 20}
    answer = shared.client.post("/v1/completions", json=body, headers=ANNA)
    assert answer.status_code == 200, answer.text
    assert int(answer.headers["x-fairlead-cpu-ms"]) > 1000 * 20 * 1e-3, "more than 1 µs for each entry"


def test_what_was_computed_for_a_client_that_left_is_in_the_tenants_next_answer(shared: WorkerProcess) -> None:
    prompts = [[first, *range(100, 1000), *range(100, 699)] for first in (50, 51)]  # no other test has cached them
    body = json.dumps({"prompt": prompts, "max_tokens": 2500, "ignore_eos": True})
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nx-fairlead-tenant: anna\r\ncontent-length: {len(body)}\r\n\r\n"
    before = shared.load()["output_tokens"]
    with socket.create_connection(("127.0.0.1", shared.port)) as connection:
        connection.sendall((head + body).encode())
        until(lambda: shared.load()["output_tokens"] > before + 2000, "it generates")
    until(lambda: shared.load()["running"] == 0, "it is aborted")
    computed = shared.load()["output_tokens"] - before + 2 * 1500
    answer = shared.client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}, headers=ANNA)
    price = 1e3 * SECONDS_A_TOKEN * computed
    assert price - 1 < int(answer.headers["x-fairlead-cpu-ms"]) < 2 * price, "and the reading of both"


def test_a_grammar_of_a_client_that_left_is_in_the_tenants_next_answer(shared: WorkerProcess) -> None:
    properties = {f"left{number}": {"type": "string", "pattern": "^[a-z]{1,64}$"} for number in range(300)}
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    with pytest.raises(httpx.ReadTimeout):
        body = {"prompt": "x", "guided_json": schema, "max_tokens": 1}
        shared.client.post("/v1/completions", json=body, headers=ANNA, timeout=httpx.Timeout(30, read=0.01))

    def report_of_next() -> int:
        answer = shared.client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}, headers=ANNA)
        return int(answer.headers.get("x-fairlead-cpu-ms", 0))

    until(lambda: report_of_next() >= 20, "the check of the grammar is reported")
