"""The console scripts of all packages. `pip install fairlead` installs every script; most of them need an extra to run."""

import importlib
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

OURS = ("fairlead", "fairlead_agent", "fairlead_index", "fairlead_operator", "fairlead_router", "fairlead_worker")


def _run(script: str, module: str, extra: str) -> None:
    # Linux ignores SIGTERM for the first process of a container. Without this handler it would be lost until the program sets its own.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with name_missing_extra(script, extra):
        try:
            main: Callable[[], int | None] = importlib.import_module(module).main
        except KeyboardInterrupt:  # imports take up to two seconds; nothing has started yet that needs a shutdown
            sys.exit(130)
        sys.exit(main())


@contextmanager
def name_missing_extra(script: str, extra: str) -> Iterator[None]:
    """Turn the import error of a missing package into one line that says what to install."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] in OURS:
            raise
        raise SystemExit(f"{script}: {error.name} is not installed: pip install 'fairlead[{extra}]'") from None


fairlead = partial(_run, "fairlead", "fairlead.main", "local")
kubectl = partial(_run, "kubectl-fairlead", "fairlead.kube.plugin", "operator")
operator = partial(_run, "fairlead-operator", "fairlead_operator.main", "operator")
router = partial(_run, "fairlead-router", "fairlead_router.main", "router")
batch = partial(_run, "fairlead-batch", "fairlead_router.batch.main", "router")
agent = partial(_run, "fairlead-agent", "fairlead_agent.main", "agent")
worker = partial(_run, "fairlead-worker", "fairlead_worker.main", "worker")
prefetch = partial(_run, "fairlead-prefetch", "fairlead_worker.weights.prefetch", "worker")
