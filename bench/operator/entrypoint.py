"""The operator as `fairlead-operator` starts it, with all its requests to routers sent to one address: no cluster DNS runs here.

`python -m bench.operator.entrypoint ROUTER_URL FLAGS...`
"""

import asyncio
import logging
import os
import signal
import sys

from fairlead_operator.config import OperatorConfig
from fairlead_operator.polling.prober import Prober
from fairlead_operator.run import operate


async def run(config: OperatorConfig, router: str) -> None:
    stop = asyncio.Event()

    def take_signals() -> None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)

    take_signals()
    await operate(config, stop, Prober(config.cluster_domain, base_url=router), started=take_signals)


def run_operator() -> None:
    router, *flags = sys.argv[1:]
    config = OperatorConfig(_cli_parse_args=flags)
    logging.basicConfig(level=config.log_level, format="%(asctime)s %(levelname)s %(name)s %(message)s", stream=sys.stderr)
    logging.getLogger("kopf").setLevel(logging.WARNING)

    os.environ["KUBECONFIG"] = config.kubeconfig
    asyncio.run(run(config, router))


if __name__ == "__main__":
    run_operator()
