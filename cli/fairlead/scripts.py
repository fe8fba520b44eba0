"""The console scripts of all packages. `pip install fairlead` brings every script, and only an extra brings what most of them import."""

import importlib
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

OURS = ("fairlead", "fairlead_index", "fairlead_operator", "fairlead_router", "fairlead_worker")


def fairlead() -> None:
    _run("fairlead", "fairlead.main", "local")


def kubectl() -> None:
    _run("kubectl-fairlead", "fairlead.kube.plugin", "operator")


def operator() -> None:
    _run("fairlead-operator", "fairlead_operator.main", "operator")


def router() -> None:
    _run("fairlead-router", "fairlead_router.main", "router")


def worker() -> None:
    _run("fairlead-worker", "fairlead_worker.main", "worker")


def _run(script: str, module: str, extra: str) -> None:
    # The first process of a container has no default action for SIGTERM: until the program takes it itself, it would be lost.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with naming_the_extra(script, extra):
        try:
            main: Callable[[], int | None] = importlib.import_module(module).main
        except KeyboardInterrupt:  # imports take up to a second or two; nothing has begun that would need an end
            sys.exit(130)
        sys.exit(main())


@contextmanager
def naming_the_extra(script: str, extra: str) -> Iterator[None]:
    """A package that is missing ends the process with one line that says what to install, not with a traceback."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] in OURS:
            raise
        raise SystemExit(f"{script}: {error.name} is not installed: pip install 'fairlead[{extra}]'") from None
