"""The steps of a pod in the console: drawn from the worker's trace, bounded, and a reason where there is none."""

import json
from pathlib import Path
from typing import Any

from tests.router.harness import Fleet
from tests.router.tenancy.test_access import ANNA, bearer, key_file

from fairlead_router.console.schedule import MAX_ROWS, MAX_STEPS

ABOUT = {"format": "fairlead-schedule-1", "page_size": 4}


def trace(steps: int, requests: int = 1, name: str = "r") -> bytes:
    lines: list[dict[str, Any]] = [ABOUT]
    for step in range(1000, 1000 + steps):
        rows = [[f"{name}{number}", 8 + step, 1, True] for number in range(requests)]
        lines.append({"step": step, "at": step / 100, "seconds": 0.01, "rows": rows})
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


async def page_of(fleet: Fleet, schedule: bytes | None) -> str:
    router = await fleet.router(await fleet.worker(schedule=schedule), console=True)
    answer = await router.client.get("/ui/pods/pod-0/schedule")
    assert answer.status_code == 200
    return answer.text


async def test_the_last_steps_are_drawn(fleet: Fleet) -> None:
    text = await page_of(fleet, trace(3))
    assert text.count("<svg") == 1 and "3 steps" in text and "step 1002, 10.00 ms: r0[1010:1011]" in text


async def test_the_picture_is_bounded(fleet: Fleet) -> None:
    text = await page_of(fleet, trace(MAX_STEPS + 50))
    assert f"{MAX_STEPS} steps" in text and "step 1249," in text and "step 1049," not in text
    wide = await page_of(Fleet(fleet._stack, fleet.file.parent), trace(30, requests=300))
    assert f"{MAX_ROWS // 300} steps" in wide and len(wide) < 1_000_000


async def test_without_a_trace_the_page_says_why(fleet: Fleet) -> None:
    text = await page_of(fleet, None)
    assert "<svg" not in text and "this worker writes no trace of its steps" in text and "--trace-schedule FILE" in text


async def test_an_empty_a_wrong_and_a_large_answer_are_named(fleet: Fleet) -> None:
    for schedule, reason in ((trace(0), "run no step yet"), (b"hello\n", "not a schedule trace"), (b"x" * 300_000, "not a schedule trace")):
        assert reason in await page_of(Fleet(fleet._stack, fleet.file.parent), schedule)


async def test_names_of_a_trace_are_escaped(fleet: Fleet) -> None:
    text = await page_of(fleet, trace(2, name="<script>alert(1)</script>"))
    assert "<script>alert" not in text and "&lt;script&gt;alert(1)" in text


async def test_a_tenant_does_not_see_the_steps_of_others(fleet: Fleet, tmp_path: Path) -> None:
    (tmp_path / "keys.yaml").write_text(key_file())
    worker = await fleet.worker(schedule=trace(3))
    router = await fleet.router(worker, console=True, api_keys_file=str(tmp_path / "keys.yaml"), admin_port=0)
    path, key = "/ui/pods/pod-0/schedule", bearer(ANNA)
    admin = f"http://127.0.0.1:{router.server.admin_port}{path}"
    assert [(await router.client.get(url)).status_code for url in (path, admin)] == [401, 401]
    refused = await router.client.get(path, headers=key)
    assert refused.status_code == 403 and "<svg" not in refused.text
    assert "<svg" in (await router.client.get(admin, headers=key)).text


async def test_an_unknown_pod_is_404_and_the_fleet_links_to_known_ones(fleet: Fleet) -> None:
    router = await fleet.router(await fleet.worker(), console=True)
    for path in ("/ui/pods/other/schedule", "/ui/pods/pod-0", "/ui/pods/"):
        assert (await router.client.get(path)).status_code == 404, path
    assert '<a href="/ui/pods/pod-0/schedule">pod-0</a>' in (await router.client.get("/ui")).text
