"""CPU time of the router's request handler without load pressure, with and without API keys and quotas.

The proxy behind it answers immediately. Figures are medians of 9 runs that alternate, so that a busy machine slows both alike.
Microseconds of one core per request.
"""

import asyncio
import json
import statistics
import tempfile
from hashlib import sha256
from pathlib import Path
from time import perf_counter

import uvloop

from bench.common.report import make_parser, write_report
from fairlead_index.worker_load import WorkerLoad
from fairlead_router.config import RouterConfig
from fairlead_router.fleet.scale_up_status import ScaleUpStatus
from fairlead_router.fleet.workers import WorkerTable
from fairlead_router.metrics import Metrics
from fairlead_router.request.client_request import Call
from fairlead_router.request.prompts import Prompt
from fairlead_router.request.request_params import RequestParams
from fairlead_router.serving.admission import Admission, Ticket
from fairlead_router.serving.proxy import Proxy
from fairlead_router.serving.request_handler import RequestHandler
from fairlead_router.serving.slo_gate import SloGate

KEY = "fl-a-key-for-the-benchmark-only-0123456789"
REQUESTS, RUNS, WORKERS = 20_000, 9, 64


class Behind(Proxy):
    """A proxy without I/O: it runs only the admission part of a request."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission

    async def forward(self, call: Call, prompt: Prompt, reply: object, ticket: Ticket) -> None:
        call.attempts, call.status = 1, 200
        self._admission.record_sent(ticket)
        self._admission.record_answer(ticket)


def front_of(key_file: str) -> RequestHandler:
    table = WorkerTable(lambda: 0.0)
    for number in range(WORKERS):
        table.set_addresses({*(worker.address for worker in table), f"10.0.0.{number + 1}:8000"})
    for worker in table:
        worker.ready, worker.load = True, WorkerLoad(prefill_rate=8000.0)
    metrics = Metrics(table)
    config = RouterConfig(workers="static://127.0.0.1:1", api_keys_file=key_file)
    gate = SloGate(table, metrics, config.service_classes, lambda request: {})
    admission = Admission(config, table, metrics, ScaleUpStatus(), gate, lambda request: {})
    return RequestHandler(config, admission, Behind(admission), metrics)


async def run(handler: RequestHandler, keyed: bool) -> float:
    """Return the microseconds per request."""
    began = perf_counter()
    prompt = Prompt(length=100, params=RequestParams(max_output=16))
    for _ in range(REQUESTS):
        call = Call("POST", "/v1/completions", "id", [], 100, "", KEY.encode() if keyed else b"")
        handler.authenticate(call)
        handler.select_class(call)
        assert call.account is not None
        handler.check_quota(call.account)
        call.reserve_body(400)
        call.caller.salt("")
        await handler.forward(call, prompt, None)  # type: ignore[arg-type]  # nothing writes to it
        call.release_body()
    return 1e6 * (perf_counter() - began) / REQUESTS


async def measure(folder: Path) -> dict[str, float]:
    path = folder / "keys.yaml"
    entry = {"keys": [{"sha256": sha256(KEY.encode()).hexdigest()}], "tokensPerMinute": 10**12}
    path.write_text(json.dumps({"saltSecret": "s" * 32, "tenants": {"acme": entry}}))
    fronts = {"without keys": (front_of(""), False), "keys, quotas, salts": (front_of(str(path)), True)}
    times: dict[str, list[float]] = {name: [] for name in fronts}
    for _ in range(RUNS):
        for name, (handler, keyed) in fronts.items():
            times[name].append(await run(handler, keyed))
    return {name: round(statistics.median(found), 2) for name, found in times.items()}


def main() -> None:
    parser = make_parser(__name__, __doc__)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        found = runner.run(measure(Path(folder)))
    for name, microseconds in found.items():
        print(f"{name:24} {microseconds:8.2f} us a request")
    write_report(__name__, arguments, {"microseconds": found, "workers": WORKERS, "requests": REQUESTS})
