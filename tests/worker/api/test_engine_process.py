"""The engine process's own steps, without the process."""

import gc
from pathlib import Path

from fairlead_worker.config import WorkerConfig
from fairlead_worker.engine_process import run
from fairlead_worker.messages import FromEngine, Ready, Stop, ToEngine


class End:
    """Says `Stop` as soon as it is asked, and keeps what it saw when the engine was ready."""

    def __init__(self) -> None:
        self.ready: Ready | None = None
        self.frozen = 0

    def receive(self, timeout: float | None) -> list[ToEngine]:
        return [Stop()]

    def send(self, message: FromEngine) -> None:
        if isinstance(message, Ready):
            self.ready, self.frozen = message, gc.get_freeze_count()


def test_collections_do_not_walk_what_the_load_has_made(model: Path) -> None:
    end = End()
    try:
        assert run(WorkerConfig(model=f"file://{model}", kv_pages=8, threads=1), end) == 0
    finally:
        gc.unfreeze()
    assert end.ready is not None and end.ready.pages == 8
    assert end.frozen > 10_000
