"""`fairlead-agent [FLAGS] [-- ENGINE COMMAND]`: serve one vLLM or SGLang engine as a worker."""

import asyncio
import json
import logging
import socket
import sys
from pathlib import Path

import uvloop

from fairlead_agent.config import AgentConfig, read_config
from fairlead_agent.server import AgentServer
from fairlead_common.http.framing import bound_unsent
from fairlead_common.memory import freeze_gc
from fairlead_common.telemetry.logs import configure_logging

BACKLOG = 2048
TERMINATION_BYTES = 4096
"""Kubernetes truncates a termination message to this length."""

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
    """Write the reason to the termination log and as the last line of stderr. Return the exit status."""
    path = Path(config.termination_log) if config.termination_log else None
    # Below /dev the file exists if a kubelet mounted it, and must not be created otherwise.
    if path is not None and (path.exists() or not path.is_relative_to("/dev")):
        try:
            path.write_bytes(reason.encode()[:TERMINATION_BYTES])
        except OSError as error:
            log.warning("--termination-log %s cannot be written: %s", path, error)
    if config.log_format == "json":
        log.error("%s", reason)
    else:
        print(f"fairlead-agent: {reason}", file=sys.stderr, flush=True)
    return 1


if __name__ == "__main__":
    sys.exit(main())
