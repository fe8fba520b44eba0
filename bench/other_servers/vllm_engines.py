"""vLLM engines on this CPU behind agents, for `end_to_end/engine_routers`."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import aiohttp

MODEL = "tiny"
READY_SECONDS = 900.0


class Process:
    """A started program with its log. Leaving the context ends its process group."""

    def __init__(self, name: str, command: list[str], env: dict[str, str], scratch: Path) -> None:
        self.log = scratch / f"{name}.log"
        with self.log.open("wb") as log:
            self._child = subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True, cwd=scratch)

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, *error: object) -> None:
        self._child.terminate()
        try:
            self._child.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(self._child.pid, 9)
            self._child.wait()

    def check(self) -> None:
        """Raise RuntimeError with the end of the log if the process has ended."""
        if self._child.poll() is not None:
            raise RuntimeError(f"{self.log.name}: ended with {self._child.returncode}: {self.log.read_text()[-1500:]}")


def agent_command(
    engine: Path, model: Path, pod: int, ports: dict[str, int], options: Any, redis: str, events: str
) -> tuple[list[str], dict[str, str]]:
    """Return the command line and environment of an agent that runs a vLLM engine. `events`: where the engine publishes."""
    replay = f"tcp://127.0.0.1:{ports['replay']}"
    agent = [sys.executable, "-m", "fairlead_agent.main", "--model", str(model), "--served-model-name", MODEL]
    agent += ["--engine-url", f"http://127.0.0.1:{ports['engine']}", "--kv-events", events, "--kv-replay", replay]
    agent += ["--host", "127.0.0.1", "--port", str(ports["agent"]), "--pod-name", f"pod-{pod}", "--drain-timeout", "5"]
    agent += ["--redis-url", redis, "--index-namespace", "bench/engines", "--advertise", f"127.0.0.1:{ports['agent']}"]
    config = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": events, "replay_endpoint": replay}
    serve = [str(engine), "serve", str(model), "--served-model-name", MODEL, "--dtype", "bfloat16", "--host", "127.0.0.1"]
    serve += ["--port", str(ports["engine"]), "--max-model-len", "2048", "--enforce-eager", "--block-size", str(options.block)]
    serve += ["--num-gpu-blocks-override", str(options.blocks), "--enable-prompt-tokens-details", "--kv-events-config", json.dumps(config)]
    variables = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": str(pod % 2),
    }
    return [*agent, "--", *serve], {**os.environ, **variables}


async def wait_ready(session: aiohttp.ClientSession, url: str, processes: list[Process]) -> None:
    """Wait until a server answers `/ready` with 200."""
    async with asyncio.timeout(READY_SECONDS):
        while True:
            for process in processes:
                process.check()
            try:
                async with session.get(f"{url}/ready") as answer:
                    if answer.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.5)
