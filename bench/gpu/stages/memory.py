"""Stage: what the profile left for a step is enough for every step of a load that asks for everything."""

import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from bench.gpu.device import Device
from bench.gpu.model import save_llama, scheduler_for, submit
from fairlead_worker.execution.memory_profile import run_largest_step
from fairlead_worker.execution.runner_builder import RunnerBuilder
from fairlead_worker.ipc.messages import Sampling
from fairlead_worker.model.loader import load_model
from fairlead_worker.scheduler.config import SchedulerConfig
from fairlead_worker.scheduler.limits import StepLimits, limit_steps


def check(device: Device) -> Iterator[dict[str, Any]]:
    """A small model with a large vocabulary, nearly all memory as KV pages, and random requests until the time is over."""
    settings: dict[str, Any] = {"max_num_seqs": 8, "chunked_prefill_size": 32} if device.tiny else {"chunked_prefill_size": 4096}
    with tempfile.TemporaryDirectory() as folder:
        loaded = load_model(
            str(save_llama(device, Path(folder), "tiny" if device.tiny else "small")),
            dtype="bfloat16",
            device=device.device,
            max_model_len=2048,
        )
        steps = SchedulerConfig(loaded.max_model_len, **settings)
        runner = RunnerBuilder(
            loaded=loaded, page_size=16, steps=steps, kv_pages=0 if device.cuda else 600, mem_fraction_static=0.98
        ).build()
        kept = limit_steps(steps, runner.step_tokens, 16) if runner.step_tokens else steps
        limits = StepLimits.from_config(kept, 16)
        yield {"what": "profile", "pages": runner.backend.pages, "step_tokens": limits.tokens, "kv_gib": _kv_gib(runner)}
        if device.cuda:
            torch.cuda.reset_peak_memory_stats(device.device)
        with torch.inference_mode():
            run_largest_step(limits, 16, runner.logits)
        yield {"what": "the worst step again, all KV there", "ok": True, **_peaks(device)}
        yield fuzz(device, runner, settings)


def fuzz(device: Device, runner: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """Random requests with random wishes, some of them aborted; a row that says how many steps went by."""
    draw, scheduler = random.Random(3), scheduler_for(runner, **settings)
    vocabulary = runner.loaded.vocabulary_size
    live: list[int] = []
    begun = steps = 0
    total, ends = (12, device.left() / 3) if device.tiny else (600, min(30.0, device.left() / 3))
    stop = device.left() - ends
    try:
        while (begun < total and device.left() > stop) or not scheduler.idle:
            while begun < total and device.left() > stop and scheduler.load().waiting < 8:
                longest = 60 if device.tiny else 1800
                prompt = [draw.randrange(vocabulary) for _ in range(draw.choice((1, 16, 32, draw.randint(1, longest))))]
                submit(scheduler, begun, prompt, _wishes(draw, 8 if device.tiny else 120))
                live.append(begun)
                begun += 1
            if live and draw.random() < 0.02:
                scheduler.abort(str(live.pop(draw.randrange(len(live)))))
            plan = scheduler.plan()
            if plan:
                steps += 1
                scheduler.advance(plan, runner.execute(plan))
    except torch.OutOfMemoryError as error:
        return {"what": "fuzzed load", "ok": False, "steps": steps, "said": str(error)[:300]}
    return {"what": "fuzzed load", "ok": steps > 0, "steps": steps, "requests": begun, **_peaks(device)}


def _wishes(draw: random.Random, most: int) -> Sampling:
    return Sampling(
        max_tokens=draw.randint(1, most),
        temperature=draw.choice((0.0, 0.7, 1.5)),
        top_p=draw.choice((1.0, 0.9)),
        top_k=draw.choice((0, 0, 30)),
        repetition_penalty=draw.choice((1.0, 1.1)),
        logprobs=draw.choice((None, None, 5, 20)),
        prompt_logprobs=draw.choice((None, None, None, 1)),
        seed=draw.randrange(1 << 30),
        ignore_eos=True,
    )


def _kv_gib(runner: Any) -> float:
    return float(round(runner.backend.pages * runner.backend.spec.page_bytes / 2**30, 2))


def _peaks(device: Device) -> dict[str, float]:
    if not device.cuda:
        return {}
    free, total = torch.cuda.mem_get_info(device.device)
    return {
        "peak_gib": round(torch.cuda.max_memory_reserved(device.device) / 2**30, 2),
        "free_gib": round(free / 2**30, 2),
        "of_gib": round(total / 2**30, 1),
    }
