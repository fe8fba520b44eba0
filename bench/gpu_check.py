"""Whether the engine is right on this machine's GPU: greedy tokens of random models against transformers' own `generate`, then rates.

Without a device it says so in one line and exits 0. Writes one JSON to bench/results/gpu, named by date and commit.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from array import array
from datetime import UTC, datetime
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from fairlead.random_model import make_model
from fairlead_index.hashing import extend
from fairlead_worker.cache.pages import PagePool
from fairlead_worker.cache.prefix import PrefixCache
from fairlead_worker.engine.config import SchedulerConfig
from fairlead_worker.engine.scheduler import Scheduler
from fairlead_worker.execution.host import CudaHostStore, PlainHostStore
from fairlead_worker.execution.runner import make_runner
from fairlead_worker.messages import Sampling, Submit
from fairlead_worker.model.loader import load_model

RESULTS = Path(__file__).parent / "results" / "gpu"
ARCHITECTURES = ("llama", "qwen3", "mistral", "gemma3", "gpt2")
LENGTHS = (1, 17, 64, 300, 1000)
NEW_TOKENS = 24


def engine_tokens(folder: Path, device: str, prompts: list[list[int]], chunk: int, host: bool = False) -> tuple[list[list[int]], float]:
    """Greedy tokens of all prompts, batched through the real scheduler and runner in fp32; and seconds.

    `host`: with pages for little more than the longest prompt and a host tier for the rest, everything twice; what is said the second time.
    """
    loaded = load_model(str(folder), dtype="float32", device=device)
    runner = make_runner(loaded, page_size=16, kv_pages=70 if host else 1024)
    if host:
        store = CudaHostStore if device == "cuda" else PlainHostStore
        runner.host = store(runner.backend, 200)
    config = SchedulerConfig(max_model_len=loaded.max_model_len, chunked_prefill_size=chunk, eos_token_ids=())
    scheduler = Scheduler(config, PrefixCache(PagePool(runner.backend.pages, 16), 64, extend, 200 if host else 0))
    greedy = Sampling(max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True)
    start = time.perf_counter()
    for _ in range(2 if host else 1):
        tokens: list[list[int]] = [[] for _ in prompts]
        for number, prompt in enumerate(prompts):
            scheduler.submit(Submit(str(number), array("I", prompt).tobytes(), greedy, 1))
        while not scheduler.idle:
            plan = scheduler.plan()
            for output in scheduler.advance(plan, runner.execute(plan)):
                tokens[int(output.id)] += memoryview(output.tokens).cast("I").tolist()
    told = scheduler.load().host
    assert not host or (told is not None and told.cached_tokens > 0), "nothing came back from the host tier"
    return tokens, time.perf_counter() - start


@torch.inference_mode()
def reference_tokens(folder: Path, device: str, prompts: list[list[int]]) -> list[list[int]]:
    """What `generate` says, one prompt at a time."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device=device)
        length = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS}
        out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **length)
        answers.append(out[0, len(prompt) :].tolist())
    return answers


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda", help="cpu runs the same checks without a GPU and writes nothing")
    device = parser.parse_args().device
    if device == "cuda" and not torch.cuda.is_available():
        print("gpu-check: no GPU found on this machine (torch.cuda.is_available() is false); nothing was checked")
        return 0
    torch.backends.cuda.matmul.allow_tf32 = False
    draw = torch.Generator().manual_seed(1)
    prompts = [torch.randint(10, 2000, (length,), generator=draw).tolist() for length in LENGTHS]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for arch in ARCHITECTURES:
            made = make_model(Path(folder) / arch, arch=arch)
            wanted = reference_tokens(made, device, prompts)
            for chunk, host in ((64, False), (512, False), (0, False), (64, True)):
                got, seconds = engine_tokens(made, device, prompts, chunk, host)
                equal = sum(mine == theirs for mine, theirs in zip(got, wanted, strict=True))
                rows.append(
                    {"arch": arch, "chunk": chunk, "host_tier": host, "equal": equal, "prompts": len(prompts), "seconds": round(seconds, 3)}
                )
                tier = "  host tier" if host else ""
                print(
                    f"{arch:8} chunk {chunk:4}{tier}  equal to generate: {equal} of {len(prompts)}  {seconds:6.2f} s",
                    flush=True,
                )
    wrong = [row for row in rows if row["equal"] != row["prompts"]]
    print(f"gpu_greedy_equal {len(rows) - len(wrong)} {len(rows)} {'short' if wrong else 'ok'}")
    if device == "cuda":
        record(rows)
    return 1 if wrong else 0


def record(rows: list[dict[str, object]]) -> None:
    """One JSON, named by date and commit."""
    described = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    commit, now = described.stdout.strip() or "unknown", datetime.now(UTC)
    facts = {"date": now.isoformat(), "commit": commit, "device": torch.cuda.get_device_name(), "torch": torch.__version__}
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / f"{now:%Y-%m-%d}-{commit}.json").write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
