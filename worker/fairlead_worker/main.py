"""`fairlead-worker`: one model replica, or one node of it.

It reads the configuration, binds the port, and serves until a signal or the engine's end.
"""

import asyncio
import logging
import os
import signal
import socket
import sys
from types import ModuleType

import uvloop

from fairlead_common.telemetry.logs import configure_logging
from fairlead_common.telemetry.tracer import Tracer, TracingError, create_tracer
from fairlead_common.termination import report_failure
from fairlead_index.redis.access import has_password
from fairlead_worker.api.engine.child import EngineChild
from fairlead_worker.config import WorkerConfig
from fairlead_worker.platform.imports import gc_frozen
from fairlead_worker.platform.isa import CpuLevelError, cpu_level

logger = logging.getLogger(__name__)

BACKLOG = 2048
SWITCH_SECONDS = 0.0005
"""How long the event loop waits for Python's lock at each of its turns while a thread formats log-probabilities. Python's own value, 5 ms,
multiplies the time of a short request (`bench router/hostile_clients`, prompt logprobs)."""


def main(arguments: list[str] | None = None) -> int:
    """Run the worker and return its exit status."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # cores are the engine's, and a thread's CPU time is its request's
    config = WorkerConfig.from_command_line(arguments)
    configure_logging(config.log_level, config.log_format, sys.stderr, "%(asctime)s %(levelname)s %(name)s: %(message)s")
    for noisy in ("uvicorn", "uvicorn.error"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    try:
        level = cpu_level()
    except CpuLevelError as error:
        return _fail(config, str(error))
    logger.info("CPU level: %s", level)
    logger.info("configuration: %s", config.describe())
    if has_password(config.redis_url):
        logger.warning("FAIRLEAD_REDIS_URL holds a password, which manifests show: use FAIRLEAD_REDIS_CREDENTIALS")
    if config.node_rank:
        from fairlead_worker.parallel.node import serve as serve_ranks

        try:
            failure = serve_ranks(config)
        except Exception as error:
            logger.exception("this node failed")
            failure = f"{type(error).__name__}: {error}"
        status = _fail(config, failure) if failure else 0
        logging.shutdown()
        os._exit(status)  # a normal exit waits for downloads, and one from an unresponsive source may never end
    try:
        identity = {
            "service.instance.id": config.pod,
            "fairlead.inference_service": config.index_namespace,
            "fairlead.model": config.names[0],
        }
        tracer = create_tracer("fairlead-worker", config.otlp_traces_endpoint, identity)
    except TracingError as error:
        return _fail(config, str(error))
    listeners = []
    for port in (config.port, config.admin_port):
        try:
            if port is not None:
                listeners.append(_listen(config.host, port))
        except OSError as error:
            return _fail(config, f"cannot listen on {config.host}:{port}: {error.strerror}")
    sys.setswitchinterval(SWITCH_SECONDS)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        failure = runner.run(_serve(config, listeners, tracer))
    if tracer is not None:
        tracer.close()
    return _fail(config, failure) if failure else 0


async def _serve(config: WorkerConfig, listeners: list[socket.socket], tracer: Tracer | None) -> str:
    """Start the engine, which imports for seconds, then import what serves it. Return what `api.server.serve` returns."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, task.cancel)  # until the server has its own handlers
    child = EngineChild(config)
    try:
        try:
            await child.start()
        except OSError as error:
            return f"the engine process cannot be started: {error.strerror}"
        server = await asyncio.to_thread(_import_server)  # beside the loop, which writes the engine's configuration
        failure: str = await server.serve(config, server.Listeners(*listeners), child, tracer)
    except asyncio.CancelledError:
        return ""
    finally:
        child.kill()
        child.close()
    return failure


def _import_server() -> ModuleType:
    with gc_frozen():
        from fairlead_worker.api import server
    return server


def _listen(host: str, port: int) -> socket.socket:
    if host == "0.0.0.0" and socket.has_dualstack_ipv6():
        # All addresses: in an IPv6 cluster a pod has no IPv4 address. It also works if only the kernel has IPv6 and no interface does.
        return socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=BACKLOG)
    # It listens before the remaining imports, so that probes during these wait for a response instead of being refused.
    is_ipv6 = ":" in host
    family = socket.AF_INET6 if is_ipv6 else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=BACKLOG, dualstack_ipv6=is_ipv6 and socket.has_dualstack_ipv6())


def _fail(config: WorkerConfig, reason: str) -> int:
    return report_failure("fairlead-worker", reason, config.termination_log, config.log_format)


if __name__ == "__main__":
    sys.exit(main())
