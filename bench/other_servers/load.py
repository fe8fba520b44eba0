"""The client, the same for every server: `vllm bench serve` from vLLM's environment."""

import json
import resource
import subprocess
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.other_servers.environments import Environment
from bench.other_servers.process import Running, machine_cpu_seconds
from bench.other_servers.servers import NAME

CLIENT_SECONDS = 600
OUTPUT = 64
_RANDOM = ["--dataset-name", "random", "--random-input-len", "256", "--random-output-len", str(OUTPUT)]
DATA = {
    "random": _RANDOM,
    "prefix": [
        *("--dataset-name", "prefix_repetition", "--prefix-repetition-num-prefixes", "4", "--prefix-repetition-prefix-len", "192"),
        *("--prefix-repetition-suffix-len", "64", "--prefix-repetition-output-len", str(OUTPUT)),
    ],
    "single": _RANDOM,
}


@dataclass(frozen=True)
class Size:
    """How many requests the client sends, and how many at a time."""

    requests: int = 32
    warm_ups: int = 8
    concurrency: int = 8


SIZES = {"single": Size(requests=8, warm_ups=2, concurrency=1)}
"""Of kinds of load that have another size."""


class LoadFailed(Exception):
    """The client failed. The message is the end of its output."""


@dataclass(frozen=True)
class Measured:
    """The figures of one run of the client, in milliseconds, tokens per second, seconds and bytes."""

    ttft_p50: float
    ttft_p99: float
    itl_p50: float
    itl_p99: float
    tokens_per_second: float
    output_tokens: int
    empty: int
    """Answers without text."""
    failed: int
    startup: float
    pss: int
    server_cpu: float
    """CPU seconds of the server while the client ran."""
    others: float
    """Mean number of cores that other processes used: how busy the machine was."""

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


def measure(server: Running, client: Environment, tokenizer: Path, data: str, *, seed: int, startup: float, scratch: Path) -> Measured:
    """Load the server once. Raises LoadFailed."""
    size = SIZES.get(data, Size())
    result = scratch / "client.json"
    result.unlink(missing_ok=True)
    command = [
        *(str(client.tool("vllm")), "bench", "serve", "--backend", "openai", "--endpoint", "/v1/completions"),
        *("--base-url", f"http://127.0.0.1:{server.port}", "--model", NAME, "--tokenizer", str(tokenizer), *DATA[data]),
        *("--num-prompts", str(size.requests), "--num-warmups", str(size.warm_ups), "--max-concurrency", str(size.concurrency)),
        *("--ignore-eos", "--temperature", "0", "--seed", str(seed), "--disable-tqdm"),
        *(
            "--percentile-metrics",
            "ttft,itl",
            "--metric-percentiles",
            "50,99",
            "--save-result",
            "--save-detailed",
            "--result-filename",
            str(result),
        ),
    ]
    if server.headers:
        command += ["--header", *server.headers]
    before, began = (server.cpu_seconds(), _client_cpu(), machine_cpu_seconds()), time.monotonic()
    log = scratch / "client.log"
    with log.open("wb") as output:
        ended = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, cwd=scratch, timeout=CLIENT_SECONDS, check=False)
    passed = time.monotonic() - began
    own, clients, all_of_it = (
        now - then for now, then in zip((server.cpu_seconds(), _client_cpu(), machine_cpu_seconds()), before, strict=True)
    )
    if ended.returncode or not result.exists():
        raise LoadFailed(f"status {ended.returncode}: {' | '.join(log.read_text(errors='replace').splitlines()[-6:])}")
    saved = json.loads(result.read_text())
    if not saved["completed"]:
        raise LoadFailed(f"all {size.requests} requests failed: {next((error for error in saved.get('errors', []) if error), '')[-300:]}")
    return Measured(
        ttft_p50=saved["p50_ttft_ms"],
        ttft_p99=saved["p99_ttft_ms"],
        itl_p50=saved["p50_itl_ms"],
        itl_p99=saved["p99_itl_ms"],
        tokens_per_second=OUTPUT * saved["completed"] / saved["duration"],
        output_tokens=OUTPUT * saved["completed"],
        empty=saved["generated_texts"].count(""),
        failed=saved["failed"],
        startup=startup,
        pss=server.proportional_bytes(),
        server_cpu=own,
        others=max(0.0, all_of_it - own - clients) / passed,
    )


def _client_cpu() -> float:
    """Return the CPU seconds of ended children. During a measurement these are clients only."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
