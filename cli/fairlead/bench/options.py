"""The options of `fairlead bench serve`."""

import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from fairlead.errors import UserError, check_http_url
from fairlead.options import KeyFile, Output

random_option, prefix_option, trace_option = (
    partial(typer.Option, rich_help_panel=f"Dataset {name}") for name in ("random", "prefix-repetition", "trace")
)
_POSITIVE = (
    "num_prompts",
    "random_input_len",
    "random_output_len",
    "request_rate",
    "burstiness",
    "max_concurrency",
    "vocab_size",
    "timeout",
)


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """The options of `fairlead bench serve`."""

    base_url: Annotated[str, typer.Option("--base-url", "--url", metavar="U", help="URL of the server, http://HOST:PORT.")]
    backend: Annotated[Literal["openai", "openai-chat"], typer.Option(help="API: completions, or chat completions.")] = "openai"
    model: Annotated[str | None, typer.Option(metavar="M", help="Model name (default: the first that the server lists).")] = None
    dataset: Annotated[
        Literal["random", "prefix-repetition", "trace"], typer.Option(help="Workload: random tokens, repeated prefixes, or a trace.")
    ] = "random"
    num_prompts: Annotated[int, typer.Option(metavar="N", help="Number of requests.")] = 100
    request_rate: Annotated[
        float, typer.Option(metavar="R", help="Requests per second, independent of answers.", show_default="all at once")
    ] = math.inf
    burstiness: Annotated[float, typer.Option(metavar="B", help="Of the arrivals. 1: Poisson; below 1: burstier; above 1: more even.")] = (
        1.0
    )
    max_concurrency: Annotated[int | None, typer.Option(metavar="N", help="Maximum concurrent requests.")] = None
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of prompts and arrivals.")] = 0
    random_input_len: Annotated[int, random_option(metavar="N", help="Prompt tokens, without the shared prefix.")] = 1024
    random_output_len: Annotated[int, random_option(metavar="N", help="Tokens to generate.")] = 128
    random_range_ratio: Annotated[float, random_option(metavar="X", help="Lengths vary by ± this share.")] = 0.0
    random_prefix_len: Annotated[int, random_option(metavar="N", help="Length of a prefix that all random prompts share.")] = 0
    prefix_repetition_prefix_len: Annotated[int, prefix_option(metavar="N", help="Tokens of a repeated prefix.")] = 256
    prefix_repetition_suffix_len: Annotated[int, prefix_option(metavar="N", help="Tokens after it.")] = 256
    prefix_repetition_num_prefixes: Annotated[int, prefix_option(metavar="N", help="Number of different prefixes.")] = 10
    prefix_repetition_output_len: Annotated[int, prefix_option(metavar="N", help="Tokens to generate.")] = 128
    trace_path: Annotated[Path | None, trace_option(metavar="FILE", help="A Mooncake trace, JSON lines.")] = None
    trace_speed: Annotated[float, trace_option(metavar="X", help="Replay the trace X times as fast.")] = 1.0
    trace_scale: Annotated[float, trace_option(metavar="X", help="Multiply all lengths of the trace by X.")] = 1.0
    prompt_format: Annotated[
        Literal["tokens", "text"], typer.Option(help="text: made with the server's /detokenize, and always for openai-chat.")
    ] = "tokens"
    vocab_size: Annotated[int | None, typer.Option(metavar="N", help="Use token ids below N, for a server without /tokenize.")] = None
    temperature: Annotated[float, typer.Option(metavar="T", help="Sampling temperature.")] = 0.0
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Always generate the requested number of tokens.")] = False
    timeout: Annotated[float, typer.Option(metavar="S", help="Seconds for one request.")] = 3600
    save_result: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write all figures as JSON, in the field names of vllm bench serve.")
    ] = None
    save_detailed: Annotated[bool, typer.Option("--save-detailed", help="Include every request's times and texts in the result.")] = False
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a report with plots as one HTML file.")] = None
    api_key_file: KeyFile = None
    output: Output = "table"

    def check(self) -> None:
        """Raise UserError for a value that cannot be used, before the measurement."""
        for name in _POSITIVE:
            value = getattr(self, name)
            if value is not None and not value > 0:  # written so that nan is refused too
                raise UserError(f"--{name.replace('_', '-')} {value}: must be above 0")
        check_http_url("--base-url", self.base_url)
        for flag, path in (("save-result", self.save_result), ("html", self.html)):
            if path and not path.absolute().parent.is_dir():
                raise UserError(f"--{flag} {path}: its folder does not exist; create it first")
        if self.dataset == "trace" and self.trace_path is None:
            raise UserError("--dataset trace needs --trace-path FILE")

    @property
    def sends_text(self) -> bool:
        """Return whether prompts are text. Chat messages cannot be token ids."""
        return self.prompt_format == "text" or self.backend == "openai-chat"
