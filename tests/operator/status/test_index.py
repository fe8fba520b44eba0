"""`status.index`: what one router reports, in coarse steps; a lasting fault sets Degraded, and never Ready=False."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.operator.status.test_conditions import condition
from tests.operator.support.manifests import SETTINGS, deployment, pod, service
from tests.operator.support.stub_server import StubServer

from fairlead_operator.desired import Desired, desired
from fairlead_operator.observed import Observed, ObservedIndex, ObservedRedis, ProbeResult
from fairlead_operator.polling.index import IndexPoller
from fairlead_operator.polling.prober import Prober, RouterUnavailable
from fairlead_operator.status import index as index_status

NOW = datetime(2026, 1, 1, 12, 0, 0, tzinfo=UTC)
SERVING = {"worker": deployment("worker", 1), "router": deployment("router", 2)}
AWAY = ObservedIndex("Unavailable", "no password for redis: does the Secret exist in this namespace?", "Remote")


def look(seen: ObservedIndex | None, before: Desired | None = None, seconds: float = 0, **deployments: Any) -> Desired:
    observed = Observed(SERVING | deployments, probe=ProbeResult(1, True, "", 0, NOW.timestamp()), index=seen)
    status = before.status.model_dump(by_alias=True, mode="json") if before else None
    return desired(service(status=status), observed, SETTINGS, NOW + timedelta(seconds=seconds))


def test_an_unavailable_index_is_a_fault_and_the_service_stays_ready() -> None:
    lost = look(AWAY, look(ObservedIndex("Available", read="Mirror")), 10)
    assert lost.status.index is not None and lost.status.index.state == "Unavailable" and "Secret" in lost.status.index.message
    assert lost.status.index.last_transition_time == "2026-01-01T12:00:10Z" and lost.wake_at == NOW.timestamp() + 130
    assert condition(lost, "Degraded") == ("False", "AsExpected")
    later = look(AWAY, lost, 130)
    assert condition(later, "Degraded") == ("True", "IndexUnavailable") and condition(later, "Ready") == ("True", "Serving")
    assert "does the Secret exist" in next(one.message for one in later.status.conditions if one.type == "Degraded")
    assert condition(look(AWAY, later, 500), "Degraded")[0] == "True" and look(AWAY, later, 500).status == later.status, "nothing to write"
    assert condition(look(ObservedIndex("Available"), later, 600), "Degraded") == ("False", "AsExpected")


def test_the_index_status_survives_a_restart_and_needs_a_router() -> None:
    lost = look(AWAY)
    assert look(None, lost, 50).status.index == lost.status.index
    assert look(None, lost, 50, router=deployment("router", 2, ready=0)).status.index is None
    assert "index" not in look(None).status.model_dump(by_alias=True, exclude_none=True)


def test_the_status_reports_the_kind_of_redis_credentials() -> None:
    def credentials(redis: ObservedRedis | None, before: Desired | None = None) -> tuple[str, str]:
        observed = Observed(SERVING, probe=ProbeResult(1, True, "", 0, NOW.timestamp()), index=ObservedIndex("Available"), redis=redis)
        status = before.status.model_dump(by_alias=True, mode="json") if before else None
        index = desired(service(status=status), observed, SETTINGS, NOW).status.index
        assert index is not None
        return index.credentials, index.credentials_message

    assert credentials(ObservedRedis("PerService")) == ("PerService", "")
    assert credentials(ObservedRedis("Shared", "NOPERM")) == ("Shared", "NOPERM")
    assert credentials(ObservedRedis("")) == credentials(None) == (None, "")
    observed = Observed(SERVING, probe=ProbeResult(1, True, "", 0, NOW.timestamp()), redis=ObservedRedis("Shared", "NOPERM"))
    shared = desired(
        service(status=look(ObservedIndex("Available")).status.model_dump(by_alias=True, mode="json")), observed, SETTINGS, NOW
    )
    assert shared.status.index is not None and shared.status.index.credentials == "Shared", "before a router was asked"
    assert credentials(ObservedRedis(""), shared) == ("Shared", "NOPERM"), "while Redis is silent"


@given(st.lists(st.integers(0, 100), min_size=2, max_size=30))
def test_the_error_is_written_again_only_when_it_is_another_by_a_tenth(percents: list[int]) -> None:
    said = None
    for percent in percents:
        before, said = said, index_status.build_status(said, ObservedIndex("Available", error_percent=percent), 1, NOW)
        assert said is not None and said.prediction_error_percent is not None
        written = said.prediction_error_percent
        assert written % 10 == 0 and abs(written - percent) < 10
        if before is not None and before.prediction_error_percent is not None and abs(before.prediction_error_percent - percent) < 10:
            assert said == before


def test_the_same_router_is_always_polled() -> None:
    ready = {"conditions": [{"type": "Ready", "status": "True"}], "podIP": "10.0.0.1"}
    routers = [pod("r-b", "router", **ready), pod("r-a", "router", **{**ready, "podIP": "fd00::7"}), pod("r-0", "router", podIP="10.0.0.9")]
    workers = [pod("a", "worker", **ready)]
    assert index_status.choose_router([*workers, *routers]) == index_status.choose_router([*routers[::-1]]) == "[fd00::7]:8082"
    routers[1]["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert index_status.choose_router(routers) == "10.0.0.1:8082" and index_status.choose_router(workers) == ""


@contextmanager
def router(page: dict[str, Any]) -> Iterator[str]:
    """Answers `/fairlead/workers` with what `page` holds at that moment."""

    def answer(method: str, path: str, body: bytes) -> tuple[int, Any]:
        return 200 if path == "/fairlead/workers" and page else 503, page

    with StubServer(answer) as server:
        yield server.address


def worker(answers: int, over: float = 0.0, under: float = 0.0) -> dict[str, Any]:
    return {"prediction": {"answers": answers, "over": over, "under": under, "recalls": 0}}


async def test_a_routers_page_is_parsed_and_few_answers_give_no_error() -> None:
    prober = Prober("cluster.local")
    page: dict[str, Any] = {"index": "ok", "index_reason": "", "index_read": "mirror"}
    with router(page) as address:
        page["workers"] = [worker(20, over=0.314), worker(99, under=0.02), worker(3, over=1.0)]
        assert index_status.parse_router_page(await prober.fetch_workers(address)) == ObservedIndex("Available", "", "Mirror", 31)
        page |= {"index": "unavailable", "index_reason": "redis is away", "index_read": "remote", "workers": []}
        assert index_status.parse_router_page(await prober.fetch_workers(address)) == ObservedIndex(
            "Unavailable", "redis is away", "Remote"
        )
        page.clear()
        with pytest.raises(RouterUnavailable, match="503"):
            await prober.fetch_workers(address)
    await prober.close()


async def test_a_change_wakes_and_a_router_that_stops_answering_is_unknown() -> None:
    prober, told = Prober("cluster.local"), asyncio.Event()
    page: dict[str, Any] = {"index": "ok", "workers": []}
    with router(page) as address:
        watch = IndexPoller(prober, told.set)
        watch.follow(address, known=False)
        watch.poll_soon()
        await asyncio.wait_for(told.wait(), 10)
        assert watch.seen == ObservedIndex("Available")
        page.clear()
        told.clear()
        while not told.is_set():  # each look is hurried on, instead of half a minute's wait
            watch.poll_soon()
            await asyncio.sleep(0.01)
        assert watch.seen is not None and watch.seen.state == "Unknown" and "503" in watch.seen.reason
        watch.follow("", known=True)
        assert watch.seen is None
    await prober.close()
