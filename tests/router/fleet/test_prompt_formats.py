"""Prompt formats that the router fetches from workers: fetched once, compressed, never mixed up; no worker stays without one."""

import asyncio
from collections.abc import Callable

import msgspec
import pytest
from tests.router.harness import Fleet, eventually
from tests.router.prompt_format import make_format
from tests.router.stand_in_worker import Exchange, StandIn

from fairlead_common.prompts.encoder import PromptFormat
from fairlead_router.fleet import prompt_formats as formats


def large_format(revision: str = "r1") -> PromptFormat:
    """Return a format of 3 MB, the size that a large vocabulary has."""
    return msgspec.structs.replace(make_format(revision=revision), tool_template="{# " + "x" * 3_000_000 + " #}")


@pytest.mark.parametrize("packs", [True, False])
async def test_a_fleet_that_starts_simultaneously_sends_its_format_once(fleet: Fleet, monkeypatch: pytest.MonkeyPatch, packs: bool) -> None:
    read: list[int] = []

    def counted(tag: str, body: bytes, *more: object) -> formats.KnownFormat:
        read.append(len(body))
        return original(tag, body, *more)

    original: Callable[..., formats.KnownFormat] = formats._read
    monkeypatch.setattr(formats, "_read", counted)
    workers = [await fleet.worker(format=large_format(), packs=packs) for _ in range(8)]
    await fleet.router(*workers)
    assert len(read) == 1
    assert read[0] < 100_000 if packs else read[0] > 3_000_000


async def test_a_format_that_does_not_load_costs_one_fetch_and_no_request(fleet: Fleet) -> None:
    broken = msgspec.structs.replace(make_format(), tokenizer_json="{}")
    worker = await fleet.worker(format=broken)
    router = await fleet.router(worker, ready=0)
    await eventually(lambda: worker.format_fetches > 3, "the router asks again")
    assert worker.formats_sent == 1, "the retry carries the ETag"
    answer = await router.complete("hello there")
    assert answer.status_code == 200 and worker.received[0].tokens is None
    assert worker.received[0].json["prompt"] == "hello there"


async def test_a_format_whose_transfer_broke_off_is_fetched_again(fleet: Fleet) -> None:
    class TruncatesFormat(StandIn):
        async def _handle(self, method: str, path: str, headers: dict, body: bytes, reader: object, writer: object) -> None:
            if path == "/internal/prompt-format" and not self.gone:
                self.gone = 1
                exchange = Exchange(self, None, reader, writer)  # the request is not read
                await exchange.head(200, 1_000_000, "application/json", etag='"torn"')
                exchange.die()
                return
            await super()._handle(method, path, headers, body, reader, writer)  # type: ignore[arg-type]

    worker = await TruncatesFormat(pod="pod-0").start()
    fleet.workers.append(worker)
    try:
        router = await fleet.router(worker)
        await router.complete("hi")
        assert worker.gone == 1 and worker.received[0].tokens is not None
    finally:
        await worker.kill()


async def test_during_a_rollout_a_model_is_tokenized_in_the_format_of_the_workers_that_serve_it(fleet: Fleet) -> None:
    older = [await fleet.worker(format=make_format("stand-in", "r1")) for _ in range(2)]
    newer = await fleet.worker(format=msgspec.structs.replace(make_format("newer", "r2"), max_model_len=5000, model_uri="hf://org/newer"))
    router = await fleet.router(*older, newer, policy="PrefixAware")
    models = {model["id"]: model for model in (await router.client.get("/v1/models")).json()["data"]}
    assert (models["newer"]["root"], models["newer"]["parent"], models["newer"]["max_model_len"]) == ("hf://org/newer", None, 5000)
    assert (models["stand-in"]["root"], models["stand-in"]["max_model_len"]) == ("stand-in", 1_000_000)
    for worker in older:
        await worker.kill()
    await router.usable(1)
    answers = await asyncio.gather(*(router.client.post("/v1/completions", json={"model": "newer", "prompt": "hi"}) for _ in range(4)))
    assert [answer.status_code for answer in answers] == [200] * 4
    assert all(seen.tokens is not None for seen in newer.received)


async def test_the_format_of_most_usable_workers_is_current_as_workers_get_unready_and_return(fleet: Fleet) -> None:
    """The workers stay in the table, and keep their formats: only whether they are usable changes."""
    older = [await fleet.worker(format=make_format(revision="r1")) for _ in range(2)]
    newer = await fleet.worker(format=make_format(revision="r2"))
    router = await fleet.router(*older, newer)
    known = router.server.router.formats

    def tag(worker: StandIn) -> str:
        return router.table.get(worker.address).format_tag

    async def is_current(worker: StandIn) -> None:
        await eventually(lambda: known.current is not None and known.current.tag == tag(worker), f"the format of {worker.pod}")

    assert tag(older[0]) == tag(older[1]) != tag(newer)
    await is_current(older[0])
    for worker in older:
        worker.ready = False
    await is_current(newer)
    for worker in older:
        worker.ready = True
    await is_current(older[0])


async def test_revisions_of_one_model_are_listed_once_with_the_smallest_max_model_len(fleet: Fleet) -> None:
    first = await fleet.worker(format=make_format())
    second = await fleet.worker(format=msgspec.structs.replace(make_format(revision="r2"), max_model_len=4096))
    router = await fleet.router(first, second)
    (model,) = (await router.client.get("/v1/models")).json()["data"]
    assert model["max_model_len"] == 4096
    assert (await router.client.get("/v1/models/stand-in")).json() == model


async def test_a_growing_conversation_is_tokenized_incrementally(fleet: Fleet) -> None:
    worker = await fleet.worker()
    router = await fleet.router(worker)
    cache = router.server.router.formats.cache
    chat = [{"role": "user", "content": "a long question, asked again and again " * 60}]
    for _ in range(3):
        await router.client.post("/v1/chat/completions", json={"model": "stand-in", "messages": chat})
    assert cache.missed_tokens == len(worker.received[0].tokens or []) and cache.hit_tokens == 2 * cache.missed_tokens
