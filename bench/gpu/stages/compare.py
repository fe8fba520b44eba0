"""Stage: the same model and requests served by vLLM and SGLang, where their packages are installed, beside the worker."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx

from bench.gpu.device import Device
from bench.gpu.model import saved
from bench.gpu.roofline import rates_of
from bench.gpu.shared_model import Kit
from bench.gpu.stages.serving import START_SECONDS, ask, worker
from bench.other_servers.process import free_port

LONGEST = 4096
SERVERS: dict[str, Callable[[Path, int], list[str]]] = {
    "vllm": lambda model, port: [
        "vllm.entrypoints.openai.api_server", "--model", str(model), "--served-model-name", model.name, "--port", str(port),
        "--dtype", "bfloat16", "--max-model-len", str(LONGEST),
    ],
    "sglang": lambda model, port: [
        "sglang.launch_server", "--model-path", str(model), "--served-model-name", model.name, "--port", str(port),
        "--dtype", "bfloat16", "--context-length", str(LONGEST),
    ],
}  # fmt: skip
"""Package -> its module and arguments, with defaults where possible."""


def measure(device: Device, kit: Kit) -> Iterator[dict[str, Any]]:
    """Rows of streams for each server, the worker's first, then the ratios to it. One line if no other server is installed."""
    found = [name for name in SERVERS if find_spec(name) is not None]
    if not found:
        yield {"what": "comparison", "ok": True, "left_out": "neither vllm nor sglang is installed in this environment"}
        return
    rates = rates_of(device)
    kit.drop()
    shape, rounds = ("8b", ((1, 1024, 64), (64, 1024, 64))) if not device.tiny else ("tiny", ((2, 20, 4),))
    with saved(device, shape) as model:
        own: list[dict[str, Any]] = []
        with worker(device, model) as served:
            for streams in rounds:
                own.append(ask(served.url, model.name, shape, rates, *streams))
                yield own[-1] | {"with": "fairlead"}
        for name in found:
            try:
                with server(device, name, model) as url:
                    for streams, mine in zip(rounds, own, strict=True):
                        row = ask(url, model.name, shape, rates, *streams)
                        ratios = {f"{key}_of_{name}": mine[key] / row[key] for key in ("ttft_ms", "itl_ms", "output_tokens_per_s")}
                        yield row | {"with": name} | ratios
            except Exception as error:  # its own, for example of a GPU that it does not support
                yield {"what": name, "ok": False, "said": f"{type(error).__name__}: {str(error)[-600:]}"}


@contextmanager
def server(device: Device, name: str, model: Path) -> Iterator[str]:
    """Serve `model` with another server and yield its URL. Raises RuntimeError or TimeoutError, with the end of its log, if it does not
    get ready.
    """
    port = free_port()
    url, ends = f"http://127.0.0.1:{port}", time.monotonic() + min(device.left(), START_SECONDS)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with log.open("wb") as output:
            environment = os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
            command = [sys.executable, "-m", *SERVERS[name](model, port)]
            process = subprocess.Popen(command, stdout=output, stderr=output, env=environment, start_new_session=True)
        try:
            while not _is_ready(url):
                if process.poll() is not None:
                    raise RuntimeError(f"{name} ended with {process.returncode}: {log.read_text()[-1500:]}")
                if time.monotonic() > ends:
                    raise TimeoutError(f"{name} was not ready in time; its log ends: {log.read_text()[-800:]}")
                time.sleep(0.2)
            yield url
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # its workers too, which hold the device's memory
            process.wait()


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False
