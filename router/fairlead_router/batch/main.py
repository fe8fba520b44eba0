"""Entry point of `fairlead-batch`."""

import asyncio
import json
import logging
import sys

from fairlead_common.flags import exit_on_bad_flags
from fairlead_common.telemetry.logs import configure_logging
from fairlead_router.batch.config import read_config
from fairlead_router.batch.server import serve
from fairlead_router.batch.storage.base import StorageError
from fairlead_router.errors import ListenError


def main() -> None:
    """Run until SIGTERM. Exit with 1 for a storage or port that cannot be used, with 2 for an invalid configuration."""
    with exit_on_bad_flags("fairlead-batch"):
        config = read_config(sys.argv[1:])
    configure_logging(config.log_level, config.log_format, sys.stdout, "%(asctime)s %(levelname)s %(name)s %(message)s")
    logging.getLogger(__name__).info("configuration %s", json.dumps(config.model_dump(), default=str))
    try:
        asyncio.run(serve(config))
    except (StorageError, ListenError) as error:
        print(f"fairlead-batch: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
