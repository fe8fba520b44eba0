"""Real worker processes on a tiny random model. Each module shares one; tests that end their worker start their own."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.servers.redis_server import RedisServer
from tests.worker.api.generation.tool_model import make_tool_model
from tests.worker.api.process import WorkerProcess

from fairlead.random_model.build import make_model

NAMESPACE = "test/tiny"
NARROW_NAMESPACE = "test/narrow"


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "tiny", "qwen3", vocab=1024, layers=1)


@pytest.fixture(scope="session")
def redis() -> Iterator[RedisServer]:
    server = RedisServer().start()
    yield server
    server.stop()


@pytest.fixture(scope="session")
def shared(model: Path, redis: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    """A worker that tests must not end."""
    worker = WorkerProcess(
        model,
        tmp_path_factory.mktemp("shared"),
        "--trust-request-chat-template",
        FAIRLEAD_REDIS_URL=redis.url,
        FAIRLEAD_INDEX_NAMESPACE=NAMESPACE,
        FAIRLEAD_POD_NAME="pod-0",
        FAIRLEAD_CANARY="new",
    )
    yield worker.wait_ready()
    assert worker.stop() == 0


@pytest.fixture(scope="session")
def flagged(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    """A worker without Redis that tests must not end, with flags and a variable that do not affect each other.

    Its model calls tools and reasons, as `tool_model.py` says.
    """
    folder = tmp_path_factory.mktemp("flagged")
    flags = ("--metrics-names", "vllm", "--allowed-origins", "*")
    limits = ("--limits", "grammar_timeout=2,max_grammar_bytes=20000")
    worker = WorkerProcess(make_tool_model(model, folder / "tiny"), folder / "run", *flags, *limits, OMP_WAIT_POLICY="ACTIVE")
    yield worker.wait_ready()
    assert worker.stop() == 0


@pytest.fixture(scope="session")
def narrow(model: Path, redis: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    """A worker that runs one request at a time, lets three wait, and is greedy by default. Tests must not end it."""
    defaults = tmp_path_factory.mktemp("defaults")
    (defaults / "generation_config.json").write_text('{"temperature": 0.0}')
    variables = {"FAIRLEAD_REDIS_URL": redis.url, "FAIRLEAD_INDEX_NAMESPACE": NARROW_NAMESPACE}
    flags = ("--max-num-seqs", "1", "--max-waiting-requests", "3", "--generation-config", str(defaults))
    worker = WorkerProcess(model, tmp_path_factory.mktemp("narrow"), *flags, **variables)
    yield worker.wait_ready()
    assert worker.stop() == 0


@pytest.fixture
def start(model: Path, tmp_path: Path) -> Iterator[Callable[..., WorkerProcess]]:
    """Starts workers that the test may end, and kills the rest afterwards."""
    started: list[WorkerProcess] = []

    def begin(*flags: str, **variables: str) -> WorkerProcess:
        started.append(WorkerProcess(model, tmp_path / f"worker-{len(started)}", *flags, **variables))
        return started[-1]

    yield begin
    for worker in started:
        worker.kill()
