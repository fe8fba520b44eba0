"""The command `fairlead-operator`."""

import asyncio
import logging
import os
import signal
import sys

from fairlead_common.flags import exit_on_bad_flags
from fairlead_common.telemetry.logs import configure_logging
from fairlead_operator.config import OperatorConfig
from fairlead_operator.run import operate

log = logging.getLogger("fairlead_operator")


def main() -> None:
    with exit_on_bad_flags("fairlead-operator"):
        config = OperatorConfig(_cli_parse_args=True)
    configure_logging(config.log_level, config.log_format, sys.stderr, "%(asctime)s %(levelname)s %(name)s %(message)s")
    logging.getLogger("kopf").setLevel(max(logging.WARNING, logging.getLevelName(config.log_level)))
    log.info("configuration: %s", config.model_dump_json(exclude={"redis_url"}))
    if config.kubeconfig:
        os.environ["KUBECONFIG"] = config.kubeconfig  # kopf's own client reads it from there
    asyncio.run(_run_until_stopped(config))


async def _run_until_stopped(config: OperatorConfig) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def install_signal_handlers() -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)

    install_signal_handlers()
    await operate(config, stop, started=install_signal_handlers)
    log.info("stopped")


if __name__ == "__main__":
    main()
