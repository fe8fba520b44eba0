"""CPU time of the API process per request and per token, against another checkout in alternating pairs.

    python -m bench end_to_end/front_cost --base ../other-checkout

Both workers serve the same tiny model. The engine is another process and is not counted: the API process parses, tokenizes, streams and
counts. A request is a chat of one token; a token is the difference to a stream of `--tokens`, divided by their number. `--streams 256`
also measures the p99 of the time between two tokens, by wall clock, over so many streams at once. Two processes of one checkout differ by
up to a tenth in CPU time and by a factor of up to 1.7 in that p99. So both workers are restarted `--starts` times. The table has the means
over the starts of the medians over the pairs of a start, because other processes disturb single pairs. `decode` compares msgspec
with pydantic on the bodies of requests. Its pydantic models have the fields and types of the structs, without bounds, so they do less.
`encode` compares structs, dictionaries and pydantic models on a chunk of a chat, from its text to its JSON.
"""

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from pydantic import BaseModel, create_model
from tests.worker.api.process import WorkerProcess

from bench.common.report import make_parser, write_report
from fairlead.random_model.build import make_model
from fairlead_worker.api.answers.completions import ChatChunkChoice, ChatCompletionChunk, ChatDelta
from fairlead_worker.api.schema import ChatRequest, CompletionRequest, parse

FLAGS = ("--served-model-name", "tiny", "--kv-pages", "4000")
ROUNDS = 10
"""Measurements of the gaps in each start."""
PACKAGES = ("common", "index", "worker", "router", "operator", "cli", "")
CHAT: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "system", "content": "You answer briefly."}, *({"role": "user", "content": "Why is the sky blue? " * 12},) * 3],
    "temperature": 0,
    "stop": ["\n\n"],
    "ignore_eos": True,
    "stream_options": {"include_usage": True},
}
BODIES: dict[str, tuple[type[msgspec.Struct], dict[str, Any]]] = {
    "chat": (ChatRequest, CHAT),
    "8,000 token ids": (CompletionRequest, {"prompt": list(range(8000)), "max_tokens": 16}),
    "20 kB of text": (CompletionRequest, {"prompt": "Why is the sky blue? " * 1000, "max_tokens": 16}),
}


def cpu_microseconds(pid: int) -> float:
    """Return the CPU time of a process, without its children. `/proc/PID/stat` counts in units of 10,000."""
    return sum(int(path.read_text().split()[0]) for path in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e3


def measure(worker: WorkerProcess, requests: int, tokens: int) -> float:
    """Return the microseconds of the API process for each of `requests` streams of `tokens`."""
    body = json.dumps(CHAT | {"stream": True, "max_tokens": tokens})
    began = cpu_microseconds(worker.process.pid)
    for _ in range(requests):
        answer = worker.client.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
        assert answer.status_code == 200, answer.text
    return (cpu_microseconds(worker.process.pid) - began) / requests


async def gaps_of_streams(port: int, count: int, tokens: int) -> list[float]:
    """Return the milliseconds between two tokens, of `count` concurrent streams of `tokens`. Tokens that arrive together have gaps of 0."""
    fields = {"model": "tiny", "prompt": "Why is the sky blue?", "stream": True, "max_tokens": tokens, "ignore_eos": True}
    body = json.dumps(fields).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"

    async def stream() -> list[float]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head.encode() + body)
        gaps, last, ended = list[float](), 0.0, False
        while not ended:
            part = await reader.read(1 << 16)
            assert part, "the stream was cut"
            now, events = time.perf_counter(), part.count(b"data: {")
            ended = b"data: [DONE]" in part
            if events:
                gaps += [1e3 * (now - last)] * bool(last) + [0.0] * (events - 1)
                last = now
        writer.close()
        return gaps

    return [gap for gaps in await asyncio.gather(*(stream() for _ in range(count))) for gap in gaps]


def measure_gaps(worker: WorkerProcess, streams: int, tokens: int) -> float:
    """Return the p99 of the gaps, in milliseconds."""
    return statistics.quantiles(asyncio.run(gaps_of_streams(worker.port, streams, tokens)), n=100)[98]


Sample = dict[str, float]
"""Checkout → value."""


@contextmanager
def both_workers(folder: Path, model: Path, base: Path) -> Iterator[dict[str, WorkerProcess]]:
    """Start a worker of each checkout, ready and warm."""
    paths = {"base": base.resolve(), "here": Path.cwd()}
    with ExitStack() as stack:
        workers = {}
        for name, root in paths.items():
            python_path = ":".join(str(root / one) for one in PACKAGES)
            workers[name] = WorkerProcess(model, folder / name, *FLAGS, PYTHONPATH=python_path)
            stack.callback(workers[name].kill)
        for worker in workers.values():
            worker.wait_ready()
            measure(worker, 50, 2)
        yield workers


def compare_cpu_time(workers: dict[str, WorkerProcess], pairs: int, requests: int, tokens: int) -> dict[str, Sample]:
    """Return the medians of µs per request and per token of one start."""
    samples: dict[str, list[Sample]] = {"request": [], "token": []}
    for number in range(pairs):
        order = list(workers)[:: 1 if number % 2 else -1]
        whole = {name: measure(workers[name], requests, 1) for name in order}
        long = {name: measure(workers[name], max(4, 10 * requests // tokens), tokens) for name in order}
        samples["request"].append(whole)
        samples["token"].append({name: (long[name] - whole[name]) / (tokens - 1) for name in order})
    return {kind: {name: statistics.median(one[name] for one in found) for name in workers} for kind, found in samples.items()}


def compare_gaps(workers: dict[str, WorkerProcess], rounds: int, streams: int, tokens: int) -> Sample:
    """Return the median p99 of the gaps of one start, in milliseconds."""
    found: dict[str, list[float]] = {name: [] for name in workers}
    for number in range(rounds):
        for name in list(workers)[:: 1 if number % 2 else -1]:
            found[name].append(measure_gaps(workers[name], streams, tokens))
    return {name: statistics.median(each) for name, each in found.items()}


def compare(folder: Path, arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Return the means of both checkouts over the starts, their difference and their ratio; in µs, the gaps between tokens in ms."""
    model = make_model(folder / "tiny", "qwen3", vocab=1024, layers=1)
    samples: dict[str, list[Sample]] = {}
    for start in range(arguments.starts):
        where = folder / f"start{start}"
        where.mkdir()
        with both_workers(where, model, arguments.base) as workers:
            found = compare_cpu_time(workers, arguments.pairs, arguments.requests, arguments.tokens)
            if arguments.streams:
                found["itl p99"] = compare_gaps(workers, ROUNDS, arguments.streams, arguments.tokens)
        for kind, each in found.items():
            samples.setdefault(kind, []).append(each)
        print(f"start {start}: " + ", ".join(f"{kind} {each['base']:.1f} → {each['here']:.1f}" for kind, each in found.items()), flush=True)
    means = {kind: {name: statistics.mean(one[name] for one in found) for name in found[0]} for kind, found in samples.items()}
    return {
        kind: {
            **{name: round(value, 2) for name, value in mean.items()},
            "difference": round(mean["here"] - mean["base"], 2),
            "ratio": round(mean["here"] / mean["base"], 3),
            "ratios": [round(one["here"] / one["base"], 3) for one in samples[kind]],
        }
        for kind, mean in means.items()
    }


def decode() -> dict[str, dict[str, float]]:
    """Return the microseconds that each library needs for each body."""
    found = {}
    for name, (struct, body) in BODIES.items():
        model = to_pydantic(struct)
        data = json.dumps(body).encode()
        calls: dict[str, Callable[[], Any]] = {
            "msgspec": partial(parse, data, struct),
            "pydantic": partial(model.model_validate_json, data, strict=True),
        }
        found[name] = {library: round(_best(call), 1) for library, call in calls.items()}
    return found


def encode() -> dict[str, float]:
    """Return the microseconds in which each kind of object becomes a chunk of a chat."""
    made = {kind: to_pydantic(kind) for kind in (ChatCompletionChunk, ChatChunkChoice, ChatDelta)}

    def build(chunk: Callable[..., Any], choice: Callable[..., Any], delta: Callable[..., Any]) -> Any:
        choices = [choice(index=0, delta=delta(content=" blue"))]
        return chunk(id="chatcmpl-1", created=1, model="tiny", system_fingerprint="fp_1", choices=choices)

    calls: dict[str, Callable[[], Any]] = {
        "structs": lambda: msgspec.json.encode(build(ChatCompletionChunk, ChatChunkChoice, ChatDelta)),
        "dictionaries": lambda: msgspec.json.encode(build(dict, dict, dict)),
        "pydantic": lambda: build(*made.values()).model_dump_json(exclude_unset=True).encode(),
    }
    return {kind: round(_best(call, times=5000), 2) for kind, call in calls.items()}


def to_pydantic(struct: type[msgspec.Struct]) -> type[BaseModel]:
    """Return a model with the fields of a struct."""
    fields: dict[str, Any] = {}
    for field in msgspec.structs.fields(struct):
        is_plain = "StreamOptions" not in str(field.type) and "fairlead" not in str(field.type) and "Unset" not in str(field.type)
        kind = field.type if is_plain else Any
        fields[field.name] = (kind, None)
    made: type[BaseModel] = create_model(struct.__name__, **fields)
    return made


def _best(call: Callable[[], Any], runs: int = 7, times: int = 200) -> float:
    best = float("inf")
    for _ in range(runs):
        began = time.process_time()
        for _ in range(times):
            call()
        best = min(best, 1e6 * (time.process_time() - began) / times)
    return best


def main() -> None:
    parser = make_parser(__name__, __doc__)
    parser.add_argument("--base", type=Path, help="a checkout with compiled kernels to compare with; without it, only decoding is measured")
    parser.add_argument("--pairs", type=int, default=10, help="of each start")
    parser.add_argument("--requests", type=int, default=60, help="in each half of a pair")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--streams", type=int, default=0, help="concurrent streams for the time between two tokens; 0: not measured")
    parser.add_argument("--starts", type=int, default=8, help="starts of both workers")
    arguments = parser.parse_args()
    results: dict[str, Any] = {"decode": decode(), "encode": encode()}
    for name, libraries in results["decode"].items():
        print(f"decode {name:18}" + "".join(f"{library} {spent:9,.1f} µs   " for library, spent in libraries.items()))
    print(f"encode {'a chunk':18}" + "".join(f"{kind} {spent:9,.2f} µs   " for kind, spent in results["encode"].items()))
    if arguments.base:
        with tempfile.TemporaryDirectory() as folder:
            results["front"] = compare(Path(folder), arguments)
        for kind, each in results["front"].items():
            unit = "ms" if kind == "itl p99" else "µs"
            cells = "".join(f"{name} {each[name]:9,.1f} {unit}   " for name in ("base", "here", "difference"))
            print(f"{kind:9}{cells}ratio {each['ratio']:.3f} ({min(each['ratios'])} to {max(each['ratios'])})")
    write_report(__name__, arguments, results)


if __name__ == "__main__":
    main()
