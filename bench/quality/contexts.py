"""A long text computed in several ways: whole, in chunks, behind a cached prefix, after a preemption, from the host tier."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tests.real_models import convert
from tests.worker.exactness.harness import Engine
from transformers import AutoTokenizer

from bench.quality.engine import WatchedForward, make_engine, serve, step, submit
from bench.quality.plain import load_plain, score_plain
from fairlead.packaged_model import SMOLLM2
from fairlead_worker.model.loader import LoadedModel, load_model

HERE = Path(__file__).parent
TEXTS = (HERE / "text.txt", HERE / "more.txt", HERE.parents[1] / "LICENSE", HERE / "text.txt")
"""The first one comes again at the end, so that the last tokens can be known only from the first ones."""
CONTEXT = 8191
"""The longest prompt of the model: its context is 8,192 tokens with the output."""
CHUNKS = (64, 512, 2048)
QUARTERS = 4


def long_prompt(folder: Path, tokens: int) -> list[int]:
    """Return the first `tokens` tokens of the texts."""
    text = "".join(path.read_text(encoding="utf-8") for path in TEXTS)
    found: list[int] = AutoTokenizer.from_pretrained(folder)(text)["input_ids"][:tokens]
    assert len(found) == tokens, f"the texts have {len(found)} tokens"
    return found


class Seen:
    """The log-probability of each token of a prompt after those before it, where a step has computed it."""

    def __init__(self, prompt: list[int]) -> None:
        self.logprobs = torch.full((len(prompt) - 1,), torch.nan)
        self.times = torch.zeros(len(prompt) - 1, dtype=torch.int64)
        """How often each position was computed."""
        self._next = torch.tensor(prompt[1:])

    def add(self, positions: torch.Tensor, logits: torch.Tensor) -> None:
        """Take some positions of a step. Raises AssertionError if one that is computed again has other bits."""
        has_next = positions < len(self._next)
        at = positions[has_next]
        found = logits[has_next].float().log_softmax(-1).gather(1, self._next[at][:, None])[:, 0]
        again = self.times[at] > 0
        assert torch.equal(found[again], self.logprobs[at][again]), "a position that is computed again has other bits"
        self.logprobs[at] = found
        self.times[at] += 1


@contextmanager
def watch(engine: Engine, seen: Seen) -> Iterator[None]:
    """Record in `seen` what the engine computes in this context, where only that prompt may run."""
    plain = engine.runner.forward
    engine.runner.forward = WatchedForward(plain, seen.add)
    yield
    engine.runner.forward = plain


def in_chunks(loaded: LoadedModel, prompt: list[int], chunk: int) -> torch.Tensor:
    """Return the log-probabilities [len(prompt) - 1]. chunk: 0 for the whole prompt in one step."""
    engine, _ = make_engine(loaded, len(prompt) + 16, chunk)
    seen = Seen(prompt)
    with watch(engine, seen):
        serve(engine, prompt)
    return seen.logprobs


def cached(loaded: LoadedModel, prompt: list[int]) -> torch.Tensor:
    """Return the log-probabilities behind a cached prefix, the first half; NaN for that half."""
    engine, _ = make_engine(loaded, len(prompt) + 16, CHUNKS[1])
    serve(engine, prompt[: len(prompt) // 2])
    seen = Seen(prompt)
    with watch(engine, seen):
        (output,) = serve(engine, prompt)
    assert output.cached_tokens >= len(prompt) // 2 - 16
    return seen.logprobs


def from_host(loaded: LoadedModel, prompt: list[int]) -> torch.Tensor:
    """As `cached`, after another prompt has moved the prefix to the host tier."""
    half = len(prompt) // 2
    engine, _ = make_engine(loaded, len(prompt) + 16, CHUNKS[1], host_tokens=2 * len(prompt))
    serve(engine, prompt[:half])
    serve(engine, prompt[::-1])
    seen = Seen(prompt)
    with watch(engine, seen):
        (output,) = serve(engine, prompt)
    host = engine.scheduler.load().host
    assert output.cached_tokens >= half - 16
    assert host is not None and host.cached_tokens > half - 64, "all but the first pages, for which the other prompt leaves room"
    return seen.logprobs


def preempted(loaded: LoadedModel, prompt: list[int]) -> torch.Tensor:
    """Return the log-probabilities of a request that loses its pages to a more urgent one halfway, and computes them again."""
    half = len(prompt) // 2
    engine, _ = make_engine(loaded, len(prompt) + 16, CHUNKS[1])
    seen = Seen(prompt)
    submit(engine, prompt, priority=1)
    with watch(engine, seen):
        while not seen.times[half - 1]:
            step(engine)
    submit(engine, prompt[::-1])
    while not step(engine):
        pass
    assert engine.scheduler.load().preemptions == 1
    with watch(engine, seen):
        while not step(engine):
            pass
    assert (seen.times == 2).sum() > half - 64, "all is computed again but the first pages, for which the urgent request leaves room"
    return seen.logprobs


WAYS: dict[str, Callable[[LoadedModel, list[int]], torch.Tensor]] = {
    **{f"chunks of {chunk}": partial(in_chunks, chunk=chunk) for chunk in CHUNKS},
    "prefix cached": cached,
    "preempted": preempted,
    "prefix from the host tier": from_host,
}


def by_quarter(logprobs: torch.Tensor) -> list[float | None]:
    """Return the NLL of each quarter of the positions, in nats per token; None where no step has computed a part of it."""
    parts = logprobs.tensor_split(QUARTERS)
    return [None if part.isnan().any() else -part.double().mean().item() for part in parts]


def compare_ways(context: int = CONTEXT, dtype: str = "bfloat16") -> dict[str, Any]:
    """Print and return the NLL by quarter of transformers in float32 and of each way, and how many bits differ from the whole prompt's."""
    folder = convert(SMOLLM2.fetch(), "float32")
    prompt = long_prompt(folder, context)
    reference = score_plain(load_plain(folder, torch.float32), [prompt]).logprobs
    loaded = load_model(str(folder), dtype=dtype)
    whole = in_chunks(loaded, prompt, 0)
    results: dict[str, Any] = {"tokens": context, "dtype": dtype}

    def show(name: str, logprobs: torch.Tensor) -> None:
        known, quarters = ~logprobs.isnan(), by_quarter(logprobs)
        differ = None if logprobs is reference else int((logprobs[known] != whole[known]).sum())
        distance = (logprobs - reference)[known].abs().double().mean().item()
        results[name] = {"nll": quarters, "distance": distance, "computed": int(known.sum()), "differ": differ}
        shown = (" " * 8 if nll is None else f"{nll:8.4f}" for nll in quarters)
        print(f"{name:26}", *shown, f"{distance:9.4f} {known.sum():8} {'' if differ is None else differ:8}", flush=True)

    print(f"{'way':26}", *(f"{'Q' + str(quarter + 1):>8}" for quarter in range(QUARTERS)), f"{'distance':>9} {'computed':>8} {'differ':>8}")
    show("transformers, float32", reference)
    show("whole", whole)
    for name, run in WAYS.items():
        show(name, run(loaded, prompt))
    return results
