"""Entry point of `fairlead-router`."""

import json
import logging
import resource
import sys

from fairlead_common.flags import exit_on_bad_flags
from fairlead_common.memory import freeze_gc
from fairlead_common.telemetry.logs import configure_logging
from fairlead_index.redis.access import has_password
from fairlead_router import access_log
from fairlead_router.config import read_config
from fairlead_router.errors import ListenError
from fairlead_router.server import RouterServer


def main() -> None:
    """Run until SIGTERM. Exit with 0 after the drain, with 1 for a port that cannot be bound, with 2 for an invalid configuration."""
    with exit_on_bad_flags("fairlead-router"):
        config = read_config(sys.argv[1:])
        configure_logging(config.log_level, config.log_format, sys.stdout, "%(asctime)s %(levelname)s %(name)s %(message)s")
        server = RouterServer(config)
    access_log.write_bare_lines(access_log.NAME, sys.stdout)
    logging.getLogger(__name__).info("configuration %s", json.dumps(config.describe(), default=str))
    if has_password(config.redis_url):
        logging.getLogger(__name__).warning("--redis-url holds a password, which process lists show: use --redis-credentials")
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))  # a stream needs two sockets, and the usual soft limit is 1,024
    freeze_gc()
    try:
        server.run()
    except ListenError as error:
        print(f"fairlead-router: cannot listen: {error}; free the port or give another", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
