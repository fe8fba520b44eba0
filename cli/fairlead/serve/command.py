"""`fairlead serve MODEL [-- WORKER FLAGS]`."""

import argparse
import asyncio
import sys

from fairlead.console import make_console
from fairlead.serve import DEFAULT_PORT


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("serve", help="serve one model on this machine", usage="fairlead serve MODEL [options] [-- WORKER FLAGS]")
    parser.add_argument("model", metavar="MODEL", help="folder, ORG/NAME on the Hugging Face hub, hf://, s3:// or file:/// URI")
    parser.add_argument("-p", "--port", type=int, default=DEFAULT_PORT, metavar="P", help=f"port of the API (default {DEFAULT_PORT})")
    parser.add_argument("--replicas", type=int, default=1, metavar="N", help="workers; above 1 a router and Redis run too (default 1)")
    parser.add_argument(
        "--stop-grace", type=float, default=10, metavar="S", help="seconds for streams to end after Ctrl-C (default 10); Ctrl-C again: now"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Return 0 after Ctrl-C or SIGTERM, and 1 if the model cannot be served. Raises UserError."""
    from fairlead.local.cluster import PodFailed  # not above: other commands start without a worker's configuration
    from fairlead.serve.model import ModelRefused
    from fairlead.serve.run import Options, serve

    options = Options(arguments.model, arguments.port, arguments.replicas, arguments.stop_grace, tuple(arguments.flags))
    try:
        return asyncio.run(serve(options, make_console()))
    except (ModelRefused, PodFailed) as error:
        print(f"fairlead serve: {error}", file=sys.stderr)
        return 1
