"""A batch server, a router and workers as processes, each of which can be killed and started again."""

import json
import sys
import time
from collections.abc import Iterable, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import openai
from openai.types import Batch
from tests.servers.redis_server import free_port
from tests.system.processes import Process, until

MODEL = "tiny"
ANNA, BORIS = "fl-anna-key-which-is-random-in-life", "fl-boris-key-which-is-random-in-life"
SECRET = "a secret that routers and batch server share"
ENDED = ("completed", "failed", "expired", "cancelled")


def line(custom_id: str, url: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {"model": MODEL, "prompt": "hello", "max_tokens": 2, **body}}


def to_file(lines: Iterable[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(each) + "\n" for each in lines).encode()


class Deployment:
    """Starts with `start` and ends with `stop`. Workers are stand-ins in their own processes, or `workers` (addresses) that run already.

    `tls`: folder with tls.crt and tls.key for the router.
    """

    def __init__(
        self,
        folder: Path,
        storage: str = "",
        *,
        keys: bool = False,
        flags: Sequence[str] = (),
        workers: Sequence[str] | None = None,
        tls: Path | None = None,
    ) -> None:
        self.folder = folder
        self._scheme = "http" if tls is None else "https"
        self.storage = storage or f"file://{folder / 'storage'}"
        self.batch_port, self.router_port = free_port(), free_port()
        (folder / "secret").write_text(SECRET)
        secret = str(folder / "secret")
        self.worker: Process | None = None
        if workers is None:
            workers = [f"127.0.0.1:{free_port()}"]
            command = [sys.executable, "-m", "tests.system.worker_process", "--port", workers[0].rpartition(":")[2], "--pod-name", "pod-0"]
            self.worker = Process("worker", command, folder / "worker.log")
        self.list_workers(workers)
        router = [sys.executable, "-m", "fairlead_router.main", "--host", "127.0.0.1", "--port", str(self.router_port)]
        router += ["--workers", f"file://{folder / 'workers'}", "--policy", "LeastLoad", "--hold-timeout", "1", "--poll-interval", "0.2"]
        router += ["--served-model-name", MODEL]
        router += ["--batch-url", f"http://127.0.0.1:{self.batch_port}", "--batch-secret-file", secret]
        if keys:
            (folder / "keys.yaml").write_text(_keys())
            router += ["--api-keys-file", str(folder / "keys.yaml")]
        if tls is not None:
            router += ["--ssl-certfile", str(tls / "tls.crt"), "--ssl-keyfile", str(tls / "tls.key")]
            flags = (*flags, "--router-certfile", str(tls / "tls.crt"))
        batch = [sys.executable, "-m", "fairlead_router.batch.main", "--host", "127.0.0.1", "--port", str(self.batch_port)]
        batch += ["--storage", self.storage, "--router-url", self.url, "--secret-file", secret, *flags]
        self.router = Process("router", router, folder / "router.log")
        self._batch_command = batch
        self.batch = Process("batch", batch, folder / "batch.log")

    def list_workers(self, addresses: Sequence[str]) -> None:
        fresh = self.folder / "workers.new"
        fresh.write_text("".join(f"{address}\n" for address in addresses))
        fresh.replace(self.folder / "workers")

    def __enter__(self) -> "Deployment":
        try:
            for process in (self.worker, self.router, self.batch):
                if process is not None:
                    process.start()
            until(lambda: _answers(self.url + "/ready"), "the router is ready")
            self.wait_for_batch_server()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def stop(self) -> None:
        for process in (self.batch, self.router, self.worker):
            if process is not None:
                process.kill()

    @property
    def url(self) -> str:
        return f"{self._scheme}://127.0.0.1:{self.router_port}"

    @property
    def batch_url(self) -> str:
        return f"http://127.0.0.1:{self.batch_port}"

    def wait_for_batch_server(self) -> None:
        until(lambda: _answers(self.batch_url + "/ready"), "the batch server is ready")

    def batch_metric(self, name: str) -> float:
        """Return a metric of the batch server, by its name without prefix, with its labels."""
        text = httpx.get(f"{self.batch_url}/metrics", trust_env=False).text
        return sum(float(found.rpartition(" ")[2]) for found in text.splitlines() if found.startswith(f"fairlead_batch_{name} "))

    def redirect_batch_server_to(self, url: str) -> None:
        """Let the batch server, which has not started, send lines to another deployment's router."""
        self.batch = Process("batch", [*self._batch_command, "--router-url", url], self.folder / "batch.log")

    def kill_and_restart(self) -> None:
        """kill -9 of the batch server, then start it again."""
        self.batch.kill()
        self.batch.start()

    def client(self, key: str = "none") -> openai.OpenAI:
        http = httpx.Client(verify=False) if self._scheme == "https" else None
        return openai.OpenAI(
            base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=60, http_client=http, _strict_response_validation=True
        )


def upload(client: openai.OpenAI, data: bytes) -> str:
    return client.files.create(file=("input.jsonl", data), purpose="batch").id


def create(client: openai.OpenAI, lines: Iterable[dict[str, Any]], window: str = "24h", endpoint: str = "/v1/completions") -> Batch:
    file = upload(client, to_file(lines))
    return client.batches.create(input_file_id=file, endpoint=endpoint, completion_window=window)  # type: ignore[arg-type]


def wait(client: openai.OpenAI, batch: Batch, statuses: Sequence[str] = ENDED, seconds: float = 120) -> Batch:
    """Poll until the batch has one of the statuses. While the batch server restarts, its requests fail with 503."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            seen = client.batches.retrieve(batch.id)
            if seen.status in statuses:
                return seen
        except (openai.InternalServerError, openai.APIConnectionError):
            seen = batch
        assert time.monotonic() < deadline, f"{batch.id} is {seen.status}: {seen.request_counts}"
        time.sleep(0.05)


def results(client: openai.OpenAI, file: str | None) -> dict[str, dict[str, Any]]:
    """Return the result lines by custom_id. Fails if one is there twice."""
    if file is None:
        return {}
    lines = [json.loads(text) for text in client.files.content(file).text.splitlines()]
    found = {each["custom_id"]: each for each in lines}
    assert len(found) == len(lines), "a custom_id has two results"
    return found


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, trust_env=False, verify=False).status_code == 200
    except httpx.TransportError:
        return False


def _keys() -> str:
    def tenant(key: str, **more: Any) -> dict[str, Any]:
        return {"keys": [{"name": "key-1", "sha256": sha256(key.encode()).hexdigest()}], **more}

    tenants = {"anna": tenant(ANNA), "boris": tenant(BORIS)}
    return json.dumps({"saltSecret": "a secret for salts of at least 32 characters", "tenants": tenants})
