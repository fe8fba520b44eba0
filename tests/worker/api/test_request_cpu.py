"""CPU time before the engine: what is counted, who reports it, and what remains of requests without an answer."""

import asyncio
import time
from pathlib import Path

import httpx
import pytest
from tests.worker.api.process import WorkerProcess, until

from fairlead_worker.api.errors import ApiError
from fairlead_worker.api.request_cpu import COUNTED_BYTES, HEADER, MOST_TENANTS, MOST_UNREPORTED, RequestCpu, UnreportedCpu

ANNA = {"x-fairlead-tenant": "anna"}
LARGE, CHUNKED = {b"content-length": b"%d" % COUNTED_BYTES}, {b"transfer-encoding": b"chunked"}


def compute(seconds: float) -> None:
    began = time.thread_time()
    while time.thread_time() - began < seconds:
        pass


def reported(cpu: RequestCpu) -> int:
    return sum(int(value) for name, value in cpu.report() if name == HEADER)


async def test_the_steps_of_a_request_are_counted_and_not_those_of_others() -> None:
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
        assert 40 <= reported(cpu) < 100, "with the step that runs"
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


def cpu_milliseconds(process: WorkerProcess) -> float:
    """Return the CPU time of the API process, without its children."""
    return sum(int(path.read_text().split()[0]) for path in Path(f"/proc/{process.process.pid}/task").glob("*/schedstat")) / 1e6


@pytest.mark.parametrize("is_chunked", [False, True])
def test_a_worker_reports_its_reading_of_a_large_body(shared: WorkerProcess, is_chunked: bool) -> None:
    body = b'{"prompt":"x","max_tokens":1,"metadata":[' + b"[]," * 40_000 + b"0]}"
    began, total = cpu_milliseconds(shared), 0
    for _ in range(10):
        answer = shared.client.post("/v1/completions", content=iter([body]) if is_chunked else body, headers=ANNA)
        assert answer.status_code == 200, answer.text
        total += int(answer.headers["x-fairlead-cpu-ms"])
    used = cpu_milliseconds(shared) - began
    assert 0.4 * used < total <= used, "receiving it, its memory and the answer are the rest"


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
