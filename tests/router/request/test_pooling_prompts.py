"""Embeddings and scores through the router: token ids are sent for a single text, and no prefix match is predicted."""

import msgspec
import pytest
from tests.router.harness import Fleet
from tests.router.stand_in_worker import Exchange

from fairlead_common.protocols.paths import CLASSIFICATIONS, EMBEDDINGS, NO_EMBEDDINGS, NO_GENERATION, POOLED

TEXT = "a ring that guides a rope " * 20


async def whole(exchange: Exchange) -> None:
    await exchange.whole(200, {"object": "list", "data": []}, x_fairlead_usage="520 0")


@pytest.mark.parametrize("path", POOLED)
async def test_each_pooling_path_reaches_a_worker_unchanged(path: str, fleet: Fleet) -> None:
    """Except in embeddings `input` is an unknown field: the worker would take tokens before the body for the body's beginning."""
    worker = await fleet.worker(behaviour=whole)
    router = await fleet.router(worker)
    body = {
        "input": [TEXT, TEXT] if path == EMBEDDINGS else TEXT,
        "text_1": "a",
        "text_2": ["b"],
        "query": "a",
        "documents": ["b", {"text": "c"}],
    }
    answer = await router.client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    (received,) = worker.received
    assert received.path == path and received.tokens is None and msgspec.json.decode(received.body) == body


@pytest.mark.parametrize("given", [TEXT, [TEXT], list(TEXT.encode()), [list(TEXT.encode())]], ids=["text", "texts", "tokens", "lists"])
async def test_a_single_text_is_sent_with_its_tokens_and_no_prediction(given: object, fleet: Fleet) -> None:
    worker = await fleet.worker(behaviour=whole)
    router = await fleet.router(worker)
    prompt = await router.server.router.prompts.read("/v1/embeddings", msgspec.json.encode({"input": given, "cache_salt": "s"}))
    assert not len(prompt.hashes) and prompt.prompt_tokens == len(TEXT) and (prompt.params.max_output, prompt.params.salt) == (0, "s")
    assert (await router.client.post("/v1/embeddings", json={"input": given})).status_code == 200
    assert worker.received[0].tokens is not None and len(worker.received[0].tokens) == len(TEXT)


async def test_invalid_pooling_requests_are_refused_by_the_worker(fleet: Fleet) -> None:
    worker = await fleet.worker(behaviour=whole)
    router = await fleet.router(worker)
    for body in ({}, {"input": ""}, {"input": [[]]}, {"input": [True]}, {"input": [2**40]}, {"input": {"text": 1}}, {"query": 3}):
        assert (await router.client.post("/v1/embeddings", json=body)).status_code == 200
    assert all(received.tokens is None for received in worker.received) and len(worker.received) == 7


@pytest.mark.parametrize("served", [EMBEDDINGS, CLASSIFICATIONS[0]])
async def test_the_probe_sends_what_a_model_without_lm_head_serves(served: str, fleet: Fleet) -> None:
    async def headless(exchange: Exchange) -> None:
        path = exchange.request.path
        if path == served:
            await whole(exchange)
        else:
            await exchange.whole(400, {"error": {"message": "no head", "code": NO_EMBEDDINGS if path == EMBEDDINGS else NO_GENERATION}})

    worker = await fleet.worker(behaviour=headless)
    router = await fleet.router(worker)
    assert (await router.client.get("/fairlead/probe")).status_code == 200
    assert [received.path for received in worker.received] == list(dict.fromkeys(["/v1/completions", EMBEDDINGS, served]))
