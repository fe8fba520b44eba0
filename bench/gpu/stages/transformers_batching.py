"""Stage: the same work by transformers' continuous batching (`generate_batch`), on the same device, model and prompts."""

import random
import time
from collections.abc import Iterator
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from bench.gpu.device import Device
from bench.gpu.loop import Loop
from bench.gpu.model import SHAPES, saved
from bench.gpu.report import beside
from bench.gpu.roofline import beside_roofline, rates_of, requests_work
from bench.gpu.shared_model import Kit


def measure(device: Device, kit: Kit) -> Iterator[dict[str, Any]]:
    """Tokens a second from the first request to the last token, prompts included: ours, its own, and the ratio."""
    requests, prompt, new = (64, 512, 128) if not device.tiny else (3, 20, 6)
    shape = "tiny" if device.tiny else "8b"
    draw = random.Random(9)
    prompts = [[draw.randrange(10, SHAPES[shape]["vocab_size"]) for _ in range(prompt)] for _ in range(requests)]
    rates, work = rates_of(device), requests_work(shape, [(prompt, new)] * requests)
    mine, graphed, said = ours(device, kit, shape, prompts, new)
    row = {"what": f"fairlead, {requests} requests of {prompt} + {new} tokens", "tokens_per_s": mine, "graphs": graphed}
    yield beside_roofline(row, rates, work, requests * new / mine)
    kit.drop()
    its, attention, answered = theirs(device, shape, prompts, new)
    yield beside_roofline({"what": f"transformers, {attention}", "tokens_per_s": its}, rates, work, requests * new / its)
    equal = sum(answered[number] == tokens for number, tokens in said.items())
    yield beside({"what": "beside transformers", "of_transformers": mine / its, "same_answers": equal}, "of_transformers", least=3.0)


def ours(device: Device, kit: Kit, shape: str, prompts: list[list[int]], new: int) -> tuple[float, bool, dict[int, list[int]]]:
    """Tokens a second with steps ahead, of the second of two runs; whether there were graphs; and the tokens."""
    pages = len(prompts) * -(-(len(prompts[0]) + new) // 16) + 64
    runner = kit.shared(pages, len(prompts))
    seconds, tokens = 0.0, dict[int, list[int]]()
    for _ in range(2):
        loop = Loop(runner, overlap=True, max_num_seqs=len(prompts), chunked_prefill_size=8192)
        device.wait()
        began = time.perf_counter()
        for number, prompt in enumerate(prompts):
            loop.submit(number, prompt, new)
        loop.run()
        seconds, tokens = time.perf_counter() - began, loop.tokens
    return len(prompts) * new / seconds, runner.graphs is not None, tokens


def theirs(device: Device, shape: str, prompts: list[list[int]], new: int) -> tuple[float, str, list[list[int]]]:
    """Tokens a second, its attention, and the tokens. Its settings are its own defaults; making its cache, and capturing, are not counted:
    time runs from its first request's creation to its last token. RuntimeError where it does not answer."""
    with saved(device, shape) as folder:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(device.device).eval()
    config = GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=None, pad_token_id=0, bos_token_id=0)
    # Where all is tiny its cache is, too: by default it takes nearly all memory.
    sizes = ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=64) if device.tiny else None
    given: dict[str, Any] = {"generation_config": config, "continuous_batching_config": sizes}
    model.generate_batch(prompts[:2], **given)  # what is made at the first call alone
    answers = list(model.generate_batch(prompts, record_timestamps=True, **given).values())
    short = [answer for answer in answers if len(answer.generated_tokens) != new or not answer.timestamps]
    if len(answers) != len(prompts) or short:
        told = short[0].error if short else f"{len(answers)} of {len(prompts)} requests were answered"
        raise RuntimeError(f"generate_batch did not do the work: {told}")
    seconds = max(answer.timestamps[-1] for answer in answers) - min(answer.created_time for answer in answers)
    return len(prompts) * new / seconds, str(model.config._attn_implementation), [answer.generated_tokens for answer in answers]
