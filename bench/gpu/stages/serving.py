"""Stage: a Llama of 8B's shape served by the whole worker, from its process over HTTP: the start, then streams side by side."""

import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx

from bench.gpu.device import Device, median
from bench.gpu.model import SHAPES, saved
from bench.gpu.roofline import Rates, beside_roofline, decode_work, rates_of
from bench.gpu.shared_model import release

START_SECONDS = 110.0
"""A worker that is not ready by then is given up: a stage behind may still tell something."""


@dataclass
class Stream:
    """One answer: seconds to its first token and between the others."""

    first: float
    gaps: list[float]
    tokens: int


@dataclass
class Worker:
    """A worker process that is ready."""

    url: str
    seconds: float
    """From the process's start to ready."""
    row: dict[str, Any]
    """What it said of its start."""


@contextmanager
def worker(device: Device, model: Path, *more: str, gpus: int = 1) -> Iterator[Worker]:
    """The whole worker over `model`, with flags for its size and `more`, and the first `gpus` GPUs; ended with this. RuntimeError or
    TimeoutError where it does not get ready, with the end of its log."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        flags = ["--model", f"file://{model}", "--host", "127.0.0.1", "--port", "0", "--limits", "max_grammar_bytes=0"]
        flags += ["--chunked-prefill-size", "2048"] if device.cuda else ["--kv-pages", "600", "--threads", "1"]
        began, ends = time.perf_counter(), time.monotonic() + min(device.left(), START_SECONDS)
        with log.open("wb") as output:
            seen = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpus))))
            environment = os.environ | {"CUDA_VISIBLE_DEVICES": seen if device.cuda else ""}
            environment |= {"FAIRLEAD_TERMINATION_LOG": os.devnull}
            command = [sys.executable, "-m", "fairlead_worker.main", *flags, *more]
            process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
        try:
            (port,) = _logged(process, log, r"listening on http://127.0.0.1:([0-9]+)", ends)
            url = f"http://127.0.0.1:{port}"
            ready = _ready(process, log, url, ends)
            seconds = time.perf_counter() - began
            pages, attention = _logged(process, log, r"ready: .* (\d+) pages .* attention (\w+)\n", ends)
            yield Worker(url, seconds, {"pages": int(pages), "attention": attention, **ready})
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def serve(device: Device) -> Iterator[dict[str, Any]]:
    """Rows: making the model, the start by phases, then rounds of requests."""
    shape = "tiny" if device.tiny else "8b"
    began, rates = time.perf_counter(), rates_of(device)
    with saved(device, shape) as model:
        release()
        yield {"what": f"{shape} made and written", "seconds": time.perf_counter() - began}
        with worker(device, model) as served:
            yield {"what": "start", "ok": True, "seconds": served.seconds, **served.row}
            rounds = [(1, 128, 32), (16, 1024, 64), (64, 1024, 64), (256, 512, 64)] if device.cuda else [(1, 16, 4), (3, 40, 4)]
            for clients, prompt, new in rounds:
                yield ask(served.url, model.name, shape, rates, clients, prompt, new)


def ask(url: str, name: str, shape: str, rates: Rates, clients: int, prompt: int, new: int) -> dict[str, Any]:
    """A row: so many requests at once; the wait between tokens beside the roofline of a step of decodes."""
    draw = random.Random(clients)
    prompts = [[draw.randrange(300, SHAPES[shape]["vocab_size"]) for _ in range(prompt)] for _ in range(clients)]
    began = time.perf_counter()
    streams = asyncio.run(_all(url, name, prompts, new))
    seconds = time.perf_counter() - began
    gaps = sorted(gap for stream in streams for gap in stream.gaps)
    row: dict[str, Any] = {"what": f"{clients} streams of {prompt} + {new} tokens", "ok": all(stream.tokens == new for stream in streams)}
    row |= {"ttft_ms": median([stream.first for stream in streams]) * 1e3, "output_tokens_per_s": clients * new / seconds}
    if not gaps:
        return row
    row |= {"itl_ms": median(gaps) * 1e3, "itl_p99_ms": gaps[int(len(gaps) * 0.99)] * 1e3}
    return beside_roofline(row, rates, decode_work(shape, clients, prompt + new / 2), median(gaps))


async def _all(url: str, name: str, prompts: Sequence[list[int]], new: int) -> list[Stream]:
    limits = httpx.Limits(max_connections=len(prompts))
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:
        return await asyncio.gather(*(_stream(client, name, prompt, new) for prompt in prompts))


async def _stream(client: httpx.AsyncClient, name: str, prompt: list[int], new: int) -> Stream:
    body = {"model": name, "prompt": prompt, "max_tokens": new, "temperature": 0, "ignore_eos": True, "stream": True}
    body["stream_options"] = {"include_usage": True}
    began, times, tokens = time.perf_counter(), list[float](), 0
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            if chunk.get("choices"):
                times.append(time.perf_counter())
            if chunk.get("usage"):
                tokens = chunk["usage"]["completion_tokens"]
    return Stream(times[0] - began, [later - sooner for sooner, later in pairwise(times)], tokens)


def _ready(process: subprocess.Popen[bytes], log: Path, url: str, ends: float) -> dict[str, Any]:
    while time.monotonic() < ends:
        _alive(process, log)
        try:
            answer = httpx.get(f"{url}/ready", timeout=5)
        except httpx.HTTPError:
            answer = None
        if answer is not None and answer.status_code == 200:
            return {f"{name}_s": spent for name, spent in answer.json()["start_up_seconds"].items() if spent >= 0.05}
        time.sleep(0.1)
    raise TimeoutError(f"the worker was not ready in time; its log ends: {log.read_text()[-800:]}")


def _logged(process: subprocess.Popen[bytes], log: Path, pattern: str, ends: float) -> tuple[str, ...]:
    """The groups of `pattern` in the worker's log, as soon as they are there."""
    while time.monotonic() < ends:
        if found := re.search(pattern, log.read_text()):
            return found.groups()
        _alive(process, log)
        time.sleep(0.05)
    raise TimeoutError(f"the worker's log did not show {pattern!r} in time; it ends: {log.read_text()[-800:]}")


def _alive(process: subprocess.Popen[bytes], log: Path) -> None:
    if process.poll() is not None:
        raise RuntimeError(f"the worker ended with {process.returncode}: {log.read_text()[-1500:]}")
