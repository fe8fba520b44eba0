"""Generators and the Azure reader: deterministic, at the wanted load, with the shape that their parameters say."""

from array import array
from collections import Counter
from itertools import pairwise
from pathlib import Path
from statistics import mean, pstdev

import pytest

from fairlead.errors import UserError
from fairlead.simulate.catalog import GENERATORS, load, offered_load
from fairlead.simulate.pods import PodModel
from fairlead.simulate.workloads.request import BLOCK_TOKENS, Request, necessary_tokens

PODS, MODEL = 16, PodModel()


def generate(name: str, seed: int = 0, count: int = 1500, speed: float = 0.8) -> list[Request]:
    return load(name, count=count, speed=speed, pods=PODS, model=MODEL, seeds=[seed])[0]


@pytest.mark.parametrize("name", GENERATORS)
def test_a_seed_decides_every_request(name: str) -> None:
    requests = generate(name)
    assert requests == generate(name) != generate(name, seed=1)
    assert len(requests) == 1500 and all(early.at <= late.at for early, late in pairwise(requests))
    assert all(0 <= len(request.blocks) * BLOCK_TOKENS - request.prompt_tokens < BLOCK_TOKENS for request in requests)


@pytest.mark.parametrize("name", ["zipf", "bursts"])
def test_the_load_is_the_speed(name: str) -> None:
    assert offered_load(generate(name), PODS, MODEL) == pytest.approx(0.8, rel=0.02)
    assert offered_load(generate(name, speed=1.6), PODS, MODEL) == pytest.approx(1.6, rel=0.02)


@pytest.mark.parametrize("name", GENERATORS)
def test_seconds_give_every_load_the_same_span(name: str) -> None:
    for speed in (0.5, 1.5):
        requests = load(name, count=None, speed=speed, pods=PODS, model=MODEL, seeds=[0], seconds=96.0)[0]
        assert requests[-1].at == pytest.approx(96.0, rel=0.05), speed


def test_necessary_tokens_are_those_that_no_cache_has() -> None:
    first, *_ = generate("zipf", count=1)
    longer = Request(1.0, first.prompt_tokens + BLOCK_TOKENS, 1, first.blocks + array("Q", [1]))
    assert necessary_tokens([first]) == first.prompt_tokens
    assert necessary_tokens([first, first, longer]) == first.prompt_tokens + 1 + longer.prompt_tokens - len(first.blocks) * BLOCK_TOKENS


def test_zipf_asks_most_about_few_documents() -> None:
    counts = Counter(request.blocks[0] for request in generate("zipf", count=4000))
    common = [count for _, count in counts.most_common()]
    assert sum(common[:40]) > 0.5 * 4000 and len(common) > 300


def test_agents_send_their_context_again_and_share_instructions() -> None:
    requests = generate("agents")
    longest = max(requests, key=lambda request: len(request.blocks))
    turns = [request for request in requests if request.blocks[8] == longest.blocks[8]]
    assert len(turns) > 5 and all(late.blocks[: len(early.blocks)] == early.blocks for early, late in pairwise(turns))
    assert len({request.blocks[:8].tobytes() for request in requests}) == 1


def test_bursts_vary_more_than_a_poisson_process() -> None:
    def variation(name: str) -> float:
        gaps = [late.at - early.at for early, late in pairwise(generate(name, count=4000))]
        return pstdev(gaps) / mean(gaps)

    assert variation("zipf") == pytest.approx(1.0, rel=0.1) and variation("bursts") == pytest.approx(2**0.5, rel=0.1)


def test_azure_arrivals_have_unique_prompts_and_recorded_times(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:05.9799600,4808,8\n")
    (requests,) = load(str(path), count=None, speed=2.0, pods=PODS, model=MODEL, seeds=[0])
    assert [(request.at, request.prompt_tokens, request.output_tokens) for request in requests] == [(0.0, 4808, 10), (1.0, 4808, 8)]
    assert not set(requests[0].blocks) & set(requests[1].blocks) and len(requests[0].blocks) == 10


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,many,10\n", "line 2: not an Azure trace entry"),
        ("TIMESTAMP,ContextTokens\n2023-11-16 18:17:03,5\n", "line 2: not an Azure trace entry"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "it contains no request"),
    ],
)
def test_an_invalid_azure_trace_is_named(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(text)
    with pytest.raises(UserError, match=words):
        load(str(path), count=None, speed=1.0, pods=PODS, model=MODEL, seeds=[0])
