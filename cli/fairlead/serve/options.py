"""The options of `fairlead serve`."""

from dataclasses import dataclass
from typing import Annotated, Literal

import typer

from fairlead.errors import UserError
from fairlead.packaged_model import SMOLLM2
from fairlead.serve import DEFAULT_PORT

MOST_GRACE_SECONDS = 3600
Runtime = Literal["fairlead", "vllm", "sglang"]


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """The options of `fairlead serve`."""

    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            show_default=False,
            help="Folder, .gguf file, ORG/NAME on the Hugging Face hub, hf://, s3://, gs://, oci:// or file:///. "
            f"Without it: SmolLM2, downloaded once ({SMOLLM2.megabytes} MB).",
        ),
    ] = ""
    flags: Annotated[list[str] | None, typer.Argument(metavar="ENGINE FLAGS", help="Flags of fairlead-worker, or of the runtime.")] = None
    runtime: Annotated[Runtime, typer.Option(help="Engine: Fairlead's own worker, or vLLM or SGLang behind fairlead-agent.")] = "fairlead"
    port: Annotated[int, typer.Option("--port", "-p", metavar="P", help="Port of the API.")] = DEFAULT_PORT
    replicas: Annotated[int, typer.Option(metavar="N", help="Workers; above 1 a router and Redis run too.")] = 1
    stop_grace: Annotated[float, typer.Option(metavar="S", help="Seconds for streams to end after Ctrl-C; Ctrl-C again: stop now.")] = 10

    def check(self) -> None:
        """Raise UserError for a value that cannot work."""
        if not 1 <= self.port <= 65535:
            raise UserError(f"--port {self.port}: must be 1 to 65535")
        if self.replicas < 1:
            raise UserError(f"--replicas {self.replicas}: must be 1 or more")
        if self.replicas > 1 and any(flag.partition("=")[0] == "--host" for flag in self.flags or ()):
            raise UserError("--host: only for one worker, because with --replicas a router is in front of the workers")
        if self.replicas > 1 and any(flag.partition("=")[0] == "--api-key-file" for flag in self.flags or ()):
            raise UserError("--api-key-file: only for one worker, because the router of --replicas sends no key to the workers")
        if not 0 <= self.stop_grace <= MOST_GRACE_SECONDS:  # written so that nan is refused too
            raise UserError(f"--stop-grace {self.stop_grace:g}: must be 0 to {MOST_GRACE_SECONDS} seconds")
