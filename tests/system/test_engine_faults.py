"""Faults of real workers with engines, under load through two routers."""

import asyncio
import os
import signal
import sys
from collections.abc import Iterator

import pytest
from tests.servers.redis_server import RedisServer, free_port
from tests.system.load import Shape
from tests.system.processes import NAMESPACE, Fleet, Process
from tests.system.scenarios import ROUTER_FLAGS, Scenario, Scene, Times, play

from fairlead.random_model.build import make_model

TIMES = Times(rate=6, silence=4)
SHAPES = (Shape(0.5, True, 10), Shape(0.4, True, 800), Shape(0.1, False, 20))
PAUSE_SECONDS = 2.5


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("engines")
    model = make_model(folder / "tiny", "qwen3", vocab=1024, layers=1)
    with RedisServer() as redis:
        fleet = Fleet(folder, workers=0, redis=redis.url, flags=(*ROUTER_FLAGS, "--silence-timeout", f"{TIMES.silence:g}"))
        for number in range(2):
            pod, port = f"pod-{number}", free_port()
            variables = (f"FAIRLEAD_POD_NAME={pod}", f"FAIRLEAD_REDIS_URL={redis.url}", f"FAIRLEAD_INDEX_NAMESPACE={NAMESPACE}")
            command = ["env", *variables, f"FAIRLEAD_TERMINATION_LOG={os.devnull}"]
            command += [sys.executable, "-m", "fairlead_worker.main", "--host", "127.0.0.1", "--port", str(port)]
            command += ["--model", f"file://{model}", "--served-model-name", "tiny", "--kv-pages", "600", "--threads", "1"]
            fleet.add_process(pod, f"127.0.0.1:{port}", Process(pod, command, folder / f"{pod}.log"))
        with fleet:
            yield fleet


async def pause_and_engine_killed(scene: Scene) -> None:
    """A pause shorter than the silence timeout truncates no stream. A worker whose engine is killed exits."""
    paused = await scene.unharmed_pod()
    scene.fleet.worker(paused).signal(signal.SIGSTOP)
    await asyncio.sleep(PAUSE_SECONDS)
    scene.fleet.worker(paused).signal(signal.SIGCONT)
    doomed = await scene.busy_pod(streams=2)
    worker = scene.fleet.worker(doomed)
    os.kill(worker.child, signal.SIGKILL)
    assert await asyncio.to_thread(worker.wait, 30) == 1, worker.log[-2000:]


def test_clients_see_no_error_while_one_engine_lives(fleet: Fleet) -> None:
    scenario = Scenario("pause, engine kill -9", pause_and_engine_killed, cuts=True, for_good=True)
    report, broken = asyncio.run(play(scenario, fleet, TIMES, shapes=SHAPES))
    assert not broken, (broken, report.row())
