"""`fairlead check MODEL [WORKER FLAGS]`."""

import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from fairlead.console import make_console
from fairlead.errors import UserError
from fairlead.options import Output, print_data, takes
from fairlead.program import describe, new_app
from fairlead.serve.model import ModelRefused, find_model
from fairlead_worker.check.gpus import Gpu, UnknownGpu, find_gpu
from fairlead_worker.config import WorkerConfig
from fairlead_worker.errors import ModelLoadError
from fairlead_worker.weights.headers import resolve_headers

if TYPE_CHECKING:
    from fairlead_worker.check.report import Report

app = new_app()
_UNITS = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}


@dataclass(frozen=True, kw_only=True)
class CheckOptions:
    """The options of `fairlead check`."""

    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Folder, .gguf file, ORG/NAME on the Hugging Face hub, hf://, s3://, gs:// or file:///.")
    ]
    flags: Annotated[list[str] | None, typer.Argument(metavar="WORKER FLAGS", help="Flags of fairlead-worker.")] = None
    gpu: Annotated[
        str, typer.Option(metavar="NAME", help="GPU to serve on, such as H100, or its memory, as in 48GiB. Default: the CPU here.")
    ] = ""
    gpus: Annotated[int, typer.Option(metavar="N", help="GPUs that share the model (--tensor-parallel-size).")] = 1
    context: Annotated[int, typer.Option(metavar="N", help="Tokens of a request, prompt and output. Default: the longest.")] = 0
    memory: Annotated[
        str, typer.Option(metavar="SIZE", help="Memory for a worker on a CPU, such as 16GiB. Default: what is free here.")
    ] = ""
    output: Output = "table"


@app.command(
    context_settings={"ignore_unknown_options": True},  # they are the worker's
    help=describe(
        "Check whether a model can be served: by which path, in which dtype, and how many requests its memory holds. Only configs and the "
        "headers of weights are read. Flags that are not listed here are the worker's. Status 1: it cannot be served so.",
        "fairlead check ./model",
        "fairlead check Qwen/Qwen3-8B --gpu H100 --context 32768",
        "fairlead check meta-llama/Llama-3.1-70B --gpu H100 --gpus 4 --quantization fp8 --kv-cache-dtype fp8 -o json",
    ),
)
@takes(CheckOptions)
def run(options: CheckOptions) -> int:
    gpu = read_gpu(options.gpu)
    if options.gpus < 1 or (options.gpus > 1 and gpu is None):
        raise UserError(f"--gpus {options.gpus}: must be 1 or more, and above 1 it needs --gpu NAME")
    if options.context < 0:
        raise UserError(f"--context {options.context}: must be a number of tokens, or 0 for the longest request")
    if options.memory and gpu is not None:
        raise UserError(f"--memory {options.memory}: is for a CPU; leave it out, or give the GPU's memory as --gpu {options.memory}")
    try:
        uri = find_model(options.model)
    except ModelRefused as error:
        raise UserError(str(error)) from None
    config = read_config(uri, options.gpus, options.flags or ())
    memory = read_size("--memory", options.memory) if options.memory else 0
    report = check(config, gpu, options.context, memory)
    if options.output != "table":
        print_data(asdict(report), options.output)
    else:
        print_report(report)
    return 0 if report.served else 1


def check(config: WorkerConfig, gpu: Gpu | None, context: int = 0, memory: int = 0) -> "Report":
    """Return the report of `config`'s model. memory: bytes of a CPU's machine; 0: what is free here. Raises UserError without a model."""
    from fairlead_worker.check.report import check_model

    with tempfile.TemporaryDirectory(prefix="fairlead-check-") as scratch:
        try:
            folder = resolve_headers(config.model, Path(scratch))
        except ModelLoadError as error:
            raise UserError(f"{error.uri}: {error.cause}") from None
        return check_model(config, folder, gpu, context, memory)


def read_config(uri: str, gpus: int, flags: Sequence[str]) -> WorkerConfig:
    """Return the configuration that a worker with these flags has. Raises UserError; ends the process with status 2 for a wrong flag."""
    if flags and not flags[0].startswith("-"):
        raise UserError(f"{flags[0]}: one command checks one MODEL, and flags begin with --")
    for flag in (one.partition("=")[0] for one in flags):
        if flag in ("--model", "--tensor-parallel-size"):
            raise UserError(f"{flag}: {'give the model as the first argument' if flag == '--model' else 'give --gpus'} instead")
    return WorkerConfig.from_command_line(["--model", uri, "--tensor-parallel-size", str(gpus), *flags])


def read_gpu(name: str) -> Gpu | None:
    """Return the GPU called `name`, or one with this memory; None for an empty name. Raises UserError."""
    if not name:
        return None
    if name[0].isdigit():
        return Gpu(name, read_size("--gpu", name) >> 20, (8, 0), 108)
    try:
        return find_gpu(name)
    except UnknownGpu as error:
        raise UserError(f"--gpu {name}: {error}") from None


def read_size(flag: str, text: str) -> int:
    """Return the bytes of `16GiB`, `16Gi` or `16G` (all 2**30 times 16). Raises UserError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B?)", text, re.IGNORECASE)
    if match is None or float(match[1]) <= 0:
        raise UserError(f"{flag} {text}: is no size; give one as in 16GiB")
    return int(float(match[1]) * (1 << _UNITS[match[2].upper()]))


def print_report(report: "Report") -> None:
    """Print the report for people; why a model cannot be served goes to stderr."""
    console = make_console()
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    for name, text in _rows(report):
        table.add_row(name, escape(text))
    console.print(table)
    if report.problem:
        print(f"fairlead check: {report.model}: cannot be served so: {report.problem}", file=sys.stderr)


def _rows(report: "Report") -> Iterator[tuple[str, str]]:
    many = f"{report.devices} x " if report.devices > 1 else ""
    each = " on each" if report.devices > 1 else ""
    yield "served", "yes" if report.served else "no"
    yield "on", f"{many}{report.device} with {_gib(report.memory_bytes)}{' free' if report.device == 'CPU' else ''}"
    if report.model_type:
        yield "model", ", ".join(filter(None, (report.model_type, report.mechanisms)))
        yield "dtype", f"{report.dtype}; quantization: {report.quantization}"
    if report.path:
        yield (
            "path",
            report.path + ("" if report.generates else ", embeddings only") + (f" ({report.path_reason})" if report.path_reason else ""),
        )
        yield "attention", report.attention + (f" ({report.attention_reason})" if report.attention_reason else "")
    if report.weight_bytes:
        yield "weights", _gib(report.weight_bytes) + each
    if report.process_bytes:
        yield "besides", f"{_gib(report.process_bytes)}{each} for {'libraries' if report.step_bytes else 'the processes'}"
    if report.step_bytes:
        chunk = f"chunks of up to {report.chunk_tokens}" if report.chunk_tokens > 0 else "prompts are not cut"
        yield "largest step", f"{_gib(report.step_bytes)}{each}, {report.step_tokens} tokens; {chunk}"
    if report.kv_bytes_per_token:
        yield "KV", f"{report.kv_bytes_per_token} bytes a token{each}, {report.kv_dtype}; {report.kv_groups}"
    if report.state_bytes:
        yield "states", f"{_gib(report.state_bytes)}{each}" + ("" if report.kv_bytes_per_token else f"; {report.kv_groups}")
    if report.kv_bytes:
        yield "KV cache", f"{_gib(report.kv_bytes)}{each}: {report.kv_tokens} tokens"
    if report.kv_tokens:
        yield "requests", f"{report.streams} of {report.context} tokens at once; the longest has {report.max_model_len}"
    if report.uncounted:
        yield "not counted", report.uncounted
    if report.max_model_len and not report.kv_tokens:
        yield "longest", f"{report.max_model_len} tokens"


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
