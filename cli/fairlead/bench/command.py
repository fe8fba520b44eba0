"""`fairlead bench serve --base-url U --dataset …`."""

import argparse
import asyncio
import json
import math
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import aiohttp
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

from fairlead.bench.client import Outcome, build_request_body, complete, detokenize, fetch_first_model, fetch_vocabulary
from fairlead.bench.datasets import Prompt, prefix_repetition_prompts, random_prompts, trace_prompts
from fairlead.bench.load import schedule_arrivals, send_all
from fairlead.bench.report import DETAIL, compute_figures, print_figures
from fairlead.console import make_console
from fairlead.errors import UserError, check_http_url


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    bench = commands.add_parser("bench", help="measure a server's latency and throughput")
    serve = bench.add_subparsers(dest="what", required=True, metavar="WHAT").add_parser(
        "serve", help="streaming load: TTFT, TPOT, ITL, latency, tokens/s"
    )
    add = serve.add_argument
    add("--base-url", required=True, metavar="U", help="http://host:port, without /v1")
    add("--model", metavar="M", help="model name (default: the first that the server lists)")
    add("--dataset", default="random", choices=["random", "prefix-repetition", "trace"])
    add("--num-prompts", type=int, default=100, metavar="N")
    add("--request-rate", type=float, default=math.inf, metavar="R", help="requests per second (default: all immediately)")
    add("--burstiness", type=float, default=1.0, metavar="B", help="1: Poisson; below 1: burstier (default 1)")
    add("--max-concurrency", type=int, metavar="N", help="maximum concurrent requests")
    add("--seed", type=int, default=0, metavar="N")
    add("--random-input-len", type=int, default=1024, metavar="N")
    add("--random-output-len", type=int, default=128, metavar="N")
    add("--random-range-ratio", type=float, default=0.0, metavar="X", help="lengths vary by ± this share")
    add("--random-prefix-len", type=int, default=0, metavar="N", help="length of a prefix that all random prompts share")
    add("--prefix-repetition-prefix-len", type=int, default=256, metavar="N")
    add("--prefix-repetition-suffix-len", type=int, default=256, metavar="N")
    add("--prefix-repetition-num-prefixes", type=int, default=10, metavar="N")
    add("--prefix-repetition-output-len", type=int, default=128, metavar="N")
    add("--trace-path", type=Path, metavar="FILE", help="a Mooncake trace, JSON lines")
    add("--trace-speed", type=float, default=1.0, metavar="X", help="replay the trace X times as fast")
    add("--trace-scale", type=float, default=1.0, metavar="X", help="multiply all lengths of the trace by X")
    add(
        "--prompt-format",
        default="tokens",
        choices=["tokens", "text"],
        help="text: prompts as text, made with the server's /detokenize (default tokens)",
    )
    add("--vocab-size", type=int, metavar="N", help="use token ids below N, for a server without /tokenize")
    add("--temperature", type=float, default=0.0, metavar="T")
    add("--ignore-eos", action="store_true", help="always generate the requested number of tokens")
    add("--timeout", type=float, default=3600, metavar="S", help="seconds for one request")
    add("--save-result", type=Path, metavar="FILE", help="write all figures as JSON, in the field names of vllm bench serve")
    add("--save-detailed", action="store_true", help="include every request's times and texts in the result")
    serve.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    positive = (
        "num_prompts",
        "random_input_len",
        "random_output_len",
        "request_rate",
        "burstiness",
        "max_concurrency",
        "vocab_size",
        "timeout",
    )
    for flag in positive:
        value = getattr(arguments, flag)
        if value is not None and not value > 0:  # written so that nan is refused too
            raise UserError(f"--{flag.replace('_', '-')} {value}: must be above 0")
    check_http_url("--base-url", arguments.base_url)
    if arguments.save_result and not arguments.save_result.absolute().parent.is_dir():  # before the measurement
        raise UserError(f"--save-result {arguments.save_result}: its folder does not exist; create it first")
    if arguments.dataset == "trace" and arguments.trace_path is None:
        raise UserError("--dataset trace needs --trace-path FILE")
    result = asyncio.run(serve(arguments, make_console()))
    return 0 if result["completed"] else 1


async def serve(arguments: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Run the benchmark. Return the result as it is saved."""
    base_url = check_http_url("--base-url", arguments.base_url)
    limits = aiohttp.ClientTimeout(total=arguments.timeout)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=limits, read_bufsize=1 << 20) as session:
        model = arguments.model or await fetch_first_model(session, base_url)
        prompts = make_prompts(arguments, await _vocabulary(arguments, session, base_url, model))
        texts = await _texts(arguments, session, base_url, model, prompts)
        times = schedule_arrivals(prompts, rate=arguments.request_rate, burstiness=arguments.burstiness, seed=arguments.seed)

        async def send(number: int, prompt: Prompt) -> Outcome:
            body = build_request_body(
                model, prompt, ignore_eos=arguments.ignore_eos, temperature=arguments.temperature, text=texts[number] if texts else None
            )
            return await complete(session, f"{base_url}/v1/completions", body, len(prompt.tokens))

        bar = Progress("{task.description}", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console, transient=True)
        with bar:
            task = bar.add_task(f"{arguments.dataset} to {base_url}", total=len(prompts))
            outcomes, duration = await send_all(
                prompts, times, send, max_concurrency=arguments.max_concurrency, progress=lambda: bar.advance(task)
            )
    result = _header(arguments, model, len(prompts)) | compute_figures(outcomes, duration)
    print_figures(console, result)
    if arguments.save_result:
        saved = {key: value for key, value in result.items() if arguments.save_detailed or key not in DETAIL}
        arguments.save_result.write_text(json.dumps(saved, indent=1) + "\n")
    return result


def make_prompts(arguments: argparse.Namespace, words: Sequence[int]) -> list[Prompt]:
    count, seed = arguments.num_prompts, arguments.seed
    if arguments.dataset == "random":
        return random_prompts(
            words,
            count=count,
            input_len=arguments.random_input_len,
            output_len=arguments.random_output_len,
            range_ratio=arguments.random_range_ratio,
            prefix_len=arguments.random_prefix_len,
            seed=seed,
        )
    if arguments.dataset == "prefix-repetition":
        return prefix_repetition_prompts(
            words,
            count=count,
            prefix_len=arguments.prefix_repetition_prefix_len,
            suffix_len=arguments.prefix_repetition_suffix_len,
            prefixes=arguments.prefix_repetition_num_prefixes,
            output_len=arguments.prefix_repetition_output_len,
            seed=seed,
        )
    return trace_prompts(words, arguments.trace_path, count=count, speed=arguments.trace_speed, scale=arguments.trace_scale, seed=seed)


async def _vocabulary(arguments: argparse.Namespace, session: aiohttp.ClientSession, base_url: str, model: str) -> Sequence[int]:
    if arguments.vocab_size:
        return range(arguments.vocab_size)
    return await fetch_vocabulary(session, base_url, model, "\n".join(topics[name] for name in sorted(topics))[:100_000])


async def _texts(
    arguments: argparse.Namespace, session: aiohttp.ClientSession, base_url: str, model: str, prompts: Sequence[Prompt]
) -> list[str]:
    """Return the prompts as text; nothing if they are sent as token ids. A text may have a few tokens more or fewer: usage counts them."""
    if arguments.prompt_format == "tokens":
        return []
    return [await detokenize(session, base_url, model, prompt.tokens) for prompt in prompts]


def _header(arguments: argparse.Namespace, model: str, count: int) -> dict[str, Any]:
    return {
        "date": datetime.now().astimezone().strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": "openai",
        "backend": "openai",
        "label": arguments.dataset,
        "model_id": model,
        "tokenizer_id": model,
        "num_prompts": count,
        "request_rate": "inf" if math.isinf(arguments.request_rate) else arguments.request_rate,
        "burstiness": arguments.burstiness,
        "max_concurrency": arguments.max_concurrency,
    }
