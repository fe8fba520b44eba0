"""`fairlead serve [MODEL] [WORKER FLAGS]`."""

import asyncio
import re
import sys
from typing import Any

from typer.core import TyperCommand

from fairlead.console import make_console
from fairlead.errors import UserError
from fairlead.local.cluster import PodFailed
from fairlead.options import takes
from fairlead.program import describe, new_app
from fairlead.serve.default_model import with_model
from fairlead.serve.model import ModelRefused
from fairlead.serve.options import ServeOptions
from fairlead.serve.run import serve

app = new_app()


class ServeCommand(TyperCommand):
    """Refuses flags such as vLLM's `-tp 2`, read as `-t` and `-p 2`, the port, and an empty MODEL, as of an unset variable."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and not args[0]:
            raise UserError("MODEL is empty: name a model, or leave it out for SmolLM2")
        own = args[: args.index("--")] if "--" in args else args
        if flag := next((arg.partition("=")[0] for arg in own if re.match("-[A-Za-z]{2,}", arg)), ""):
            raise UserError(f"{flag}: write the flag's long name, such as --tensor-parallel-size for -tp, or give it after --")
        return super().parse_args(ctx, args)


@app.command(
    cls=ServeCommand,
    context_settings={"ignore_unknown_options": True},  # they are the worker's
    help=describe(
        "Serve one model on this machine until Ctrl-C, without a manifest. A Ctrl-C after the start is an orderly end, with status 0. "
        "Flags that are not listed here are the worker's (`fairlead-worker --help` lists them), or with --runtime those of vLLM or SGLang, "
        "which run behind a router.",
        "fairlead serve",
        "fairlead serve ./model",
        "fairlead serve Qwen/Qwen3-0.6B --max-model-len 8192",
        "fairlead serve s3://bucket/model --replicas 2 --port 9000",
        "fairlead serve Qwen/Qwen3-0.6B --runtime vllm --max-model-len 8192",
    ),
)
@takes(ServeOptions)
def run(options: ServeOptions) -> int:
    try:
        console = make_console()
        return asyncio.run(serve(with_model(options, console), console))
    except (ModelRefused, PodFailed) as error:
        print(f"fairlead serve: {error}", file=sys.stderr)
        return 1
