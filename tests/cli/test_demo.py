"""The demo's arithmetic and its pass criterion; `make demo` runs the demo itself."""

from dataclasses import replace
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from rich.console import Console

from fairlead.demo.command import MANIFEST, with_policy
from fairlead.demo.compare import broken_promises, returned_to_pod, side_by_side, summary
from fairlead.demo.conversations import conversations
from fairlead.demo.play import Turn, wait_usable
from fairlead.local.manifest import objects_of, read_manifest

KEPT = [
    Turn("anna", 1, "p0", 700, 0, 0, 1.0),
    Turn("anna", 2, "p0", 800, 752, 752, 0.1),
    Turn("boris", 1, "p1", 700, 0, 0, 1.0),
    Turn("boris", 2, "p1", 800, 752, 752, 0.3),
]


async def test_conversations_start_when_the_router_uses_all_workers() -> None:
    asked = 0

    async def workers(_: web.Request) -> web.Response:
        nonlocal asked
        asked += 1
        return web.json_response({"workers": [{"usable": True}, {"usable": asked > 2}]})

    application = web.Application()
    application.router.add_get("/fairlead/workers", workers)
    async with TestServer(application) as server:
        url = str(server.make_url("/")).rstrip("/")
        await wait_usable(url, 2, 10)
        assert asked == 3
        with pytest.raises(TimeoutError, match="the router uses 2 of 3 ready workers"):
            await wait_usable(url, 3, 0.1)


def test_a_conversation_is_not_compared_with_the_previous_one() -> None:
    assert returned_to_pod(KEPT) == [True, True]
    assert broken_promises(KEPT) == []


def test_a_turn_on_another_pod_or_with_too_little_cached_fails_the_demo() -> None:
    moved = [*KEPT[:3], replace(KEPT[3], pod="p0", cached=0)]
    assert broken_promises(moved) == ["boris, turn 2: went to p0 instead of p1"]
    cold = [KEPT[0], replace(KEPT[1], cached=640), *KEPT[2:]]
    assert broken_promises(cold) == ["anna, turn 2: 640 of 800 tokens cached (80%), promised > 80%"]


def test_the_ratio_covers_later_turns_only() -> None:
    slow = [replace(turn, ttft=turn.ttft * 4, predicted=None) for turn in KEPT]
    said = summary(KEPT, slow)
    assert "2 of 2 back on their pod, 94% of prompt tokens cached, TTFT mean 200 ms" in said
    assert said.endswith("4.0 x")
    console = Console(width=140, record=True, quiet=True)
    console.print(side_by_side(KEPT, slow))


def test_conversations_differ_from_the_first_words_in_each_run() -> None:
    one, two = conversations("PrefixAware 1"), conversations("Random 1")
    assert len(one) == 3 and all(len(person.questions) >= 4 for person in one)
    assert len({person.system[:40] for person in [*one, *two]}) == 6


def test_another_policy_changes_only_the_router() -> None:
    steered = read_manifest(MANIFEST)
    before, after = (
        {(item["kind"], item["metadata"]["name"]): item for item in objects_of(manifest.services[0], redis_url="redis://r")}
        for manifest in (steered, with_policy(steered, "Random"))
    )
    changed = {key for key in before if before[key] != after.get(key)}
    assert {key for key in changed if key[0] != "ControllerRevision"} == {("Deployment", "demo-router")}


def test_the_example_equals_the_demos_manifest() -> None:
    example = Path(__file__).parents[2] / "examples" / "demo.yaml"
    assert example.read_text() == MANIFEST.read_text()
    assert read_manifest(example.with_name("minimal.yaml")).services[0].name == "qwen"
    tenants = objects_of(read_manifest(example.with_name("tenants.yaml")).services[0], redis_url="redis://r")
    assert "--api-keys-file=/etc/fairlead/keys/keys.yaml" in str(tenants) and "--metrics-names=vllm" in str(tenants)
