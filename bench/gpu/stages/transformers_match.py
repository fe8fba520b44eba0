"""Stages: the engine's output against transformers' own. Greedy tokens in float32, logits in bfloat16."""

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from bench.gpu.device import Device
from bench.gpu.model import scheduler_for, serve, submit
from fairlead.random_model import make_model
from fairlead_worker.execution.host import CudaHostStore, PlainHostStore
from fairlead_worker.execution.runner import ModelRunner
from fairlead_worker.execution.runner_builder import RunnerBuilder
from fairlead_worker.ipc.messages import Sampling
from fairlead_worker.kernels.base import KVSpec
from fairlead_worker.kernels.reference import ReferenceBackend
from fairlead_worker.model.loader import load_model
from fairlead_worker.model.trial_text import STEPS, trial_pages

FAMILIES = ("llama", "qwen3", "mistral", "gemma3", "gpt2")
LENGTHS = (1, 17, 64, 300, 1000)
NEW_TOKENS = 24
MORE = 1.25
"""How many times as far from float32 as the reference in the same 16 bits FlashInfer may be (and 0.02 of the logits' length besides): a
random model in bfloat16 is a tenth to a fifth off whatever computes its attention."""


def greedy(device: Device) -> Iterator[dict[str, Any]]:
    """Families in float32 (on a GPU the reference backend, as FlashInfer has no float32): equal to `generate`, token for token."""
    torch.backends.cuda.matmul.allow_tf32 = False
    draw = torch.Generator().manual_seed(1)
    lengths, new = (LENGTHS[:3], 6) if device.tiny else (LENGTHS, NEW_TOKENS)
    prompts = [torch.randint(10, 2000, (length,), generator=draw).tolist() for length in lengths]
    with tempfile.TemporaryDirectory() as folder:
        for family in FAMILIES[:1] if device.tiny else FAMILIES:
            made = make_model(Path(folder) / family, arch=family)
            wanted = _generated(made, device, prompts, new)
            loaded = load_model(str(made), dtype="float32", device=device.device)
            for chunk, host in ((64, False), (0, False), (64, True)):
                got = _served(loaded, device, prompts, new, chunk, host)
                equal = sum(mine == theirs for mine, theirs in zip(got, wanted, strict=True))
                row = {"what": family, "chunk": chunk, "host_tier": host, "equal": equal, "prompts": len(prompts)}
                yield row | {"ok": equal == len(prompts)}


def logits(device: Device) -> Iterator[dict[str, Any]]:
    """Models with heads of 128, 64 and 256 in bfloat16: FlashInfer's logits against the float32 reference's, and the bfloat16 reference's
    own distance from those for comparison."""
    shapes: dict[str, dict[str, Any]] = {
        "llama, heads of 128": {"arch": "llama", "hidden": 512, "heads": 8, "kv_heads": 2, "head_dim": 128},
        "qwen3, heads of 64": {"arch": "qwen3", "hidden": 512, "heads": 8, "kv_heads": 2, "head_dim": 64},
        "mistral, window": {"arch": "mistral", "hidden": 512, "heads": 8, "kv_heads": 2, "head_dim": 128, "sliding_window": 20},
    }
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, options) in enumerate(shapes.items()):
            if device.tiny and number:
                return
            made = make_model(Path(folder) / str(number), **options)
            exact = load_model(str(made), dtype="float32", device=device.device)
            loaded = load_model(str(made), dtype="bfloat16", device=device.device)
            spec = KVSpec(loaded.layers, 16, loaded.dtype, loaded.device)
            pages = trial_pages(16)
            runners = {
                "exact": ModelRunner(exact, ReferenceBackend(replace(spec, dtype=torch.float32), pages)),
                "flashinfer": ModelRunner(loaded, device.flashinfer(spec, pages)),
                "reference": ModelRunner(loaded, ReferenceBackend(spec, pages)),
            }
            off = {"flashinfer": 0.0, "reference": 0.0}
            with torch.inference_mode():
                for rows in STEPS:
                    step = loaded.reference.text.step(rows, 16, loaded.device)
                    said = {kind: runner.forward(step, runner.backend.plan(step)).float() for kind, runner in runners.items()}
                    for kind in off:
                        relative = (said[kind] - said["exact"]).norm(dim=1) / said["exact"].norm(dim=1).clamp(min=1e-30)
                        off[kind] = max(off[kind], float(relative.nan_to_num(float("inf")).max()))
            allowed = MORE * off["reference"] + 0.02
            yield {"what": name, **off, "allowed": allowed, "ok": off["flashinfer"] <= allowed}


def _served(loaded: Any, device: Device, prompts: list[list[int]], new: int, chunk: int, host: bool) -> list[list[int]]:
    """`host`: with pages for little more than the longest prompt and a host tier, everything twice; what is said the second time."""
    runner = RunnerBuilder(loaded=loaded, page_size=16, kv_pages=70 if host else 1024).build()
    scheduler = scheduler_for(runner, chunked_prefill_size=chunk)
    if host:
        from fairlead_index.hashing import extend
        from fairlead_worker.cache.pages import PagePool
        from fairlead_worker.cache.prefix import PrefixCache
        from fairlead_worker.scheduler.scheduler import Scheduler

        runner.host = (CudaHostStore if device.cuda else PlainHostStore)(runner.backend, 200)
        scheduler = Scheduler(scheduler.config, PrefixCache(PagePool(70, 16), 64, extend, 200))
    tokens: dict[int, list[int]] = {}
    for _ in range(2 if host else 1):
        for number, prompt in enumerate(prompts):
            submit(scheduler, number, prompt, Sampling(max_tokens=new, temperature=0, ignore_eos=True))
        tokens = serve(runner, scheduler)
    return [tokens[number] for number in range(len(prompts))]


@torch.inference_mode()
def _generated(folder: Path, device: Device, prompts: list[list[int]], new: int) -> list[list[int]]:
    """What `generate` says, one prompt at a time."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device.device).eval()
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device=device.device)
        out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new, min_new_tokens=new)
        answers.append(out[0, len(prompt) :].tolist())
    return answers
