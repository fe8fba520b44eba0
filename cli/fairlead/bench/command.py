"""`fairlead bench serve --base-url U --dataset …`."""

import asyncio
import json
import math
from collections.abc import Sequence
from datetime import datetime
from pydoc_data.topics import topics
from typing import Any

import aiohttp
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

from fairlead.bench.client import Outcome, build_request_body, complete, detokenize, fetch_first_model, fetch_vocabulary
from fairlead.bench.datasets import Prompt, prefix_repetition_prompts, random_prompts, trace_prompts
from fairlead.bench.html import draw_report
from fairlead.bench.load import schedule_arrivals, send_all
from fairlead.bench.options import BenchOptions
from fairlead.bench.report import DETAIL, compute_figures, print_figures
from fairlead.console import make_console
from fairlead.errors import check_http_url
from fairlead.options import key_headers, print_data, takes
from fairlead.program import describe, new_app

app = new_app(help="Measure a server's latency and throughput.")


@app.callback()
def bench() -> None:
    """Measure a server's latency and throughput."""


@app.command(
    "serve",
    help=describe(
        "Send streaming load to any OpenAI server: TTFT, TPOT, ITL, latency, tokens/s. Without options: 100 prompts of 1,024 tokens, "
        "128 generated tokens each, all at once.",
        "fairlead bench serve --url http://127.0.0.1:8080 --num-prompts 20",
        "fairlead bench serve --url U --backend openai-chat --request-rate 4 --html report.html",
        "fairlead bench serve --url U --dataset prefix-repetition --api-key-file key.txt -o json",
    ),
)
@takes(BenchOptions)
def run(options: BenchOptions) -> int:
    """Return 1 if no request was answered."""
    options.check()
    console = make_console() if options.output == "table" else Console(stderr=True)
    result = asyncio.run(serve(options, console))
    return 0 if result["completed"] else 1


async def serve(options: BenchOptions, console: Console) -> dict[str, Any]:
    """Run the benchmark. Return the result as it is saved."""
    base_url, chat = check_http_url("--base-url", options.base_url), options.backend == "openai-chat"
    url = f"{base_url}/v1/{'chat/' if chat else ''}completions"
    limits = aiohttp.ClientTimeout(total=options.timeout)
    connector, headers = aiohttp.TCPConnector(limit=0), key_headers(options.api_key_file)
    async with aiohttp.ClientSession(connector=connector, timeout=limits, read_bufsize=1 << 20, headers=headers) as session:
        model = options.model or await fetch_first_model(session, base_url)
        prompts = make_prompts(options, await _vocabulary(options, session, base_url, model))
        texts = await _texts(options, session, base_url, model, prompts)
        times = schedule_arrivals(prompts, rate=options.request_rate, burstiness=options.burstiness, seed=options.seed)

        async def send(number: int, prompt: Prompt) -> Outcome:
            text = texts[number] if texts else None
            body = build_request_body(model, prompt, ignore_eos=options.ignore_eos, temperature=options.temperature, text=text, chat=chat)
            return await complete(session, url, body, len(prompt.tokens))

        bar = Progress("{task.description}", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console, transient=True)
        with bar:
            task = bar.add_task(f"{options.dataset} to {base_url}", total=len(prompts))
            outcomes, duration = await send_all(
                prompts, times, send, max_concurrency=options.max_concurrency, progress=lambda: bar.advance(task)
            )
    result = _header(options, model, len(prompts)) | compute_figures(outcomes, duration)
    if options.output == "table":
        print_figures(console, result)
    else:
        print_data({key: value for key, value in result.items() if key not in DETAIL}, options.output)
    if options.html:
        options.html.write_text(draw_report(result))
    if options.save_result:
        saved = {key: value for key, value in result.items() if options.save_detailed or key not in DETAIL}
        options.save_result.write_text(json.dumps(saved, indent=1) + "\n")
    return result


def make_prompts(options: BenchOptions, words: Sequence[int]) -> list[Prompt]:
    count, seed = options.num_prompts, options.seed
    if options.dataset == "random":
        return random_prompts(
            words,
            count=count,
            input_len=options.random_input_len,
            output_len=options.random_output_len,
            range_ratio=options.random_range_ratio,
            prefix_len=options.random_prefix_len,
            seed=seed,
        )
    if options.dataset == "prefix-repetition":
        return prefix_repetition_prompts(
            words,
            count=count,
            prefix_len=options.prefix_repetition_prefix_len,
            suffix_len=options.prefix_repetition_suffix_len,
            prefixes=options.prefix_repetition_num_prefixes,
            output_len=options.prefix_repetition_output_len,
            seed=seed,
        )
    assert options.trace_path is not None, "options.check() refuses it"
    return trace_prompts(words, options.trace_path, count=count, speed=options.trace_speed, scale=options.trace_scale, seed=seed)


async def _vocabulary(options: BenchOptions, session: aiohttp.ClientSession, base_url: str, model: str) -> Sequence[int]:
    if options.vocab_size:
        return range(options.vocab_size)
    return await fetch_vocabulary(session, base_url, model, "\n".join(topics[name] for name in sorted(topics))[:100_000])


async def _texts(options: BenchOptions, session: aiohttp.ClientSession, base_url: str, model: str, prompts: Sequence[Prompt]) -> list[str]:
    """Return the prompts as text; nothing if they are sent as token ids. A text may have a few tokens more or fewer: usage counts them."""
    if not options.sends_text:
        return []
    return [await detokenize(session, base_url, model, prompt.tokens) for prompt in prompts]


def _header(options: BenchOptions, model: str, count: int) -> dict[str, Any]:
    return {
        "date": datetime.now().astimezone().strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": options.backend,
        "backend": options.backend,
        "label": options.dataset,
        "model_id": model,
        "tokenizer_id": model,
        "num_prompts": count,
        "request_rate": "inf" if math.isinf(options.request_rate) else options.request_rate,
        "burstiness": options.burstiness,
        "max_concurrency": options.max_concurrency,
    }
