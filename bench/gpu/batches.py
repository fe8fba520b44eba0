"""Random paged steps: requests that grow by chunks, decodes and guesses, on scattered pages, some of them exactly full."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch

from fairlead_worker.kernels.base import Backend, KVSpec, PackedStep


@dataclass
class Growing:
    """One request: `length` tokens have KV in `pages`."""

    length: int = 0
    pages: list[int] = field(default_factory=list)


def packed(rows: Sequence[tuple[int, int]], tables: Sequence[Sequence[int]], page_size: int, device: torch.device) -> PackedStep:
    """Rows as (start, count), each with its page table."""
    spans = [range(start, start + count) for start, count in rows]
    used = [list(table[: -(-(start + count) // page_size)]) for (start, count), table in zip(rows, tables, strict=True)]
    slots = [table[p // page_size] * page_size + p % page_size for span, table in zip(spans, used, strict=True) for p in span]
    positions = torch.tensor([p for span in spans for p in span], device=device)
    return PackedStep(
        tokens=torch.zeros_like(positions),
        positions=positions,
        slots=torch.tensor(slots, device=device),
        starts=[start for start, _ in rows],
        counts=[count for _, count in rows],
        page_indptr=torch.tensor([0, *accumulate(map(len, used))], dtype=torch.int32),
        page_indices=torch.tensor([page for table in used for page in table], dtype=torch.int32),
        sampling=torch.empty(0, dtype=torch.int64, device=device),
    )


def steps(spec: KVSpec, pages: int, rng: random.Random, count: int = 6, longest: int = 400, requests: int = 6) -> Iterator[PackedStep]:
    """`count` steps over `requests` requests of up to `longest` tokens: prompts, mixed ones, decodes alone and speculating decodes."""
    free = rng.sample(range(pages), pages)
    size = spec.page_size
    live = [Growing() for _ in range(requests)]

    def grow(request: Growing, by: int) -> tuple[int, int]:
        start = request.length
        request.length += by
        while len(request.pages) * size < request.length:
            request.pages.append(free.pop())
        return start, by

    for number in range(count):
        rows: list[tuple[tuple[int, int], Growing]] = []
        alone = rng.choice(("decode", "guess"))
        for request in rng.sample(live, len(live)):
            kind = "prompt" if not request.length else rng.choice(("decode", "decode", "chunk", "guess", "none"))
            if number == 0 and rng.random() < 0.3:
                continue  # begins later, beside others' decodes
            if number % 3 == 2 and request.length:
                kind = alone  # now and then a step of decodes alone, or of speculating ones
            elif number % 3 == 2:
                continue
            match kind:
                case "prompt":
                    by = rng.choice((1, size, 2 * size, rng.randint(1, longest)))  # a full last page among them
                    rows.append((grow(request, by), request))
                case "chunk":
                    rows.append((grow(request, rng.randint(1, max(1, longest // 4))), request))
                case "decode":
                    rows.append((grow(request, 1), request))
                case "guess":  # one row a token, each behind the other
                    rows.extend((grow(request, 1), request) for _ in range(rng.randint(2, 4)))
        if rows:
            yield packed([row for row, _ in rows], [request.pages for _, request in rows], size, spec.device)


def worst_error(tested: Backend, oracle: Backend, rounds: Iterator[PackedStep], generator: torch.Generator) -> tuple[float, int]:
    """Largest |difference| / (1 + |oracle|) of any output over all layers and steps, infinity where some is no number; and tokens compared.

    `oracle` may hold its KV in another dtype: it is given what `tested` is given, rounded to that one's dtype before.
    """
    worst, tokens = 0.0, 0
    for step in rounds:
        contexts = (tested.plan(step), oracle.plan(step))
        total = sum(step.counts)
        tokens += total
        for layer, kind in enumerate(tested.spec.layers):
            shapes = ((kind.heads, kind.key_dim), (kind.kv_heads, kind.key_dim), (kind.kv_heads, kind.value_dim))
            parts = [torch.randn(total, *shape, generator=generator).to(tested.spec.device, tested.spec.dtype) for shape in shapes]
            got = contexts[0].attend(layer, *parts).double()
            want = contexts[1].attend(layer, *(part.to(oracle.spec.dtype) for part in parts)).double()
            error = ((got - want).abs() / (1 + want.abs())).nan_to_num(float("inf"))
            worst = max(worst, float(error.max()))
    return worst, tokens
