"""`/fairlead/probe`: a real completion, which the admin port gives without a key and which callers cannot make expensive."""

import asyncio
from pathlib import Path

import pytest
from tests.router.harness import Fleet
from tests.router.stand_in_worker import Exchange
from tests.router.tenancy.test_access import guarded


async def test_a_hundred_concurrent_probes_cost_one_completion(fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fairlead_router.serving.probe.FRESH_SECONDS", 60)
    router, worker = await guarded(fleet, tmp_path, admin_port=0)
    probe = f"http://127.0.0.1:{router.server.admin_port}/fairlead/probe"
    asked = await asyncio.gather(*[router.client.get(probe) for _ in range(100)])
    assert {one.status_code for one in asked} == {200} and all(one.json()["choices"] for one in asked)
    assert len(worker.received) == 1 and worker.received[0].json["max_tokens"] == 1
    assert (await router.client.post(probe, json={"prompt": "mine"})).status_code == 405


async def test_the_probe_reports_the_error_that_a_client_would_get(fleet: Fleet) -> None:
    async def broken(exchange: Exchange) -> None:
        await exchange.whole(500, {"error": {"message": "no"}})

    router = await fleet.router(await fleet.worker(behaviour=broken))
    assert (await router.client.get("/fairlead/probe")).status_code == 500
    empty = await fleet.router(ready=0, workers=fleet.list_in_file(), hold_timeout=0.1)
    answer = await empty.client.get("/fairlead/probe")
    assert answer.status_code == 503 and answer.json()["error"]["code"] == "service_unavailable"
