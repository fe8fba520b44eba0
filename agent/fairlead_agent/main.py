"""`fairlead-agent [FLAGS] [-- ENGINE COMMAND]`: serve one vLLM or SGLang engine as a worker."""

import asyncio
import json
import logging
import socket
import sys

import uvloop

from fairlead_agent.config import AgentConfig, read_config
from fairlead_agent.server import AgentServer
from fairlead_common.http.framing import bound_unsent
from fairlead_common.memory import freeze_gc
from fairlead_common.telemetry.logs import configure_logging
from fairlead_common.termination import report_failure

BACKLOG = 2048

log = logging.getLogger(__name__)


def main() -> int:
    """Run the agent and return its exit status."""
    flags, command = _split(sys.argv[1:])
    config = read_config(flags)
    configure_logging(config.log_level, config.log_format, sys.stderr, "%(asctime)s %(levelname)s %(name)s: %(message)s")
    log.info("configuration: %s", json.dumps(config.describe(), default=str))
    listeners = []
    for port in (config.port, config.admin_port):
        try:
            if port is not None:
                listeners.append(_listen(config.host, port))
        except OSError as error:
            return _fail(config, f"cannot listen on {config.host}:{port}: {error.strerror}")
    freeze_gc()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        failure = runner.run(_serve(config, listeners, command))
    return _fail(config, failure) if failure else 0


async def _serve(config: AgentConfig, listeners: list[socket.socket], command: list[str]) -> str:
    return await AgentServer(config, listeners, command).run()


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Return the agent's flags, and the engine's command after `--`."""
    at = arguments.index("--") if "--" in arguments else len(arguments)
    return arguments[:at], arguments[at + 1 :]


def _listen(host: str, port: int) -> socket.socket:
    if host == "0.0.0.0" and socket.has_dualstack_ipv6():  # in an IPv6 cluster a pod has no IPv4 address
        listener = socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=BACKLOG)
    else:
        listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=BACKLOG)
    bound_unsent(listener)
    return listener


def _fail(config: AgentConfig, reason: str) -> int:
    return report_failure("fairlead-agent", reason, config.termination_log, config.log_format)


if __name__ == "__main__":
    sys.exit(main())
