"""The command `fairlead-operator`."""

import asyncio
import logging
import os
import signal
import sys

from pydantic import ValidationError
from pydantic_settings import SettingsError

from fairlead_common.telemetry.logs import configure_logging
from fairlead_index.redis.access import redact_url
from fairlead_operator.config import OperatorConfig
from fairlead_operator.run import operate

log = logging.getLogger("fairlead_operator")


def main() -> None:
    try:
        config = OperatorConfig(_cli_parse_args=True)
    except ValidationError as error:
        for found in error.errors(include_url=False):
            flag = ".".join(str(part) for part in found["loc"])
            if not flag:
                print(f"fairlead-operator: {found['msg'].removeprefix('Value error, ')}", file=sys.stderr)
                continue
            value = redact_url(str(found["input"])) if flag == "redis_url" else found["input"]
            said = "is missing; give one of them" if found["type"] == "missing" else f"{found['msg']} (given: {value!r})"
            print(f"fairlead-operator: --{flag.replace('_', '-')} or FAIRLEAD_{flag.upper()}: {said}", file=sys.stderr)
        sys.exit(2)
    except SettingsError as error:
        words = str(error).removeprefix("error parsing CLI: ")
        print(f"fairlead-operator: {words}; fairlead-operator --help lists the flags", file=sys.stderr)
        sys.exit(2)
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
