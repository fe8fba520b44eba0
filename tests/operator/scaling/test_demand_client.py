"""Polls for the demand reach routers of this release and of earlier ones."""

from urllib.parse import parse_qs, urlsplit

import pytest
from tests.operator.support.stub_server import StubServer

from fairlead_operator.polling.demand_client import DemandClient, DemandUnavailable

PAGE = {"idle_seconds": 1.0, "active": 0, "queued": 0, "queued_tokens": 0, "requests_per_second": 0, "prompt_tokens_per_second": 0}
PAGE |= {"cached_share": 0, "answer_seconds": 0, "prefill_rate": 0, "draining": False, "workers": []}


@pytest.mark.parametrize(("accepted", "methods"), [("POST", ["POST"]), ("GET", ["POST", "GET"])], ids=["this", "earlier"])
async def test_the_report_reaches_routers_of_each_release(accepted: str, methods: list[str]) -> None:
    asked: list[tuple[str, dict[str, list[str]]]] = []

    def answer(method: str, path: str, body: bytes) -> tuple[int, object]:
        asked.append((method, parse_qs(urlsplit(path).query)))
        return (200, PAGE) if method == accepted else (405, {})

    client = DemandClient()
    with StubServer(answer) as server:
        report = await client.fetch(server.url.removeprefix("http://"), 0.0, {"wanted": 2, "starting": 1})
    await client.close()
    assert report.idle_seconds == 1.0
    assert [method for method, _ in asked] == methods
    assert asked[-1][1]["wanted"] == ["2"]


async def test_another_status_is_no_reason_to_ask_again() -> None:
    asked: list[str] = []

    def answer(method: str, path: str, body: bytes) -> tuple[int, object]:
        asked.append(method)
        return 503, {}

    client = DemandClient()
    with StubServer(answer) as server, pytest.raises(DemandUnavailable, match="answered 503"):
        await client.fetch(server.url.removeprefix("http://"), 0.0, {})
    await client.close()
    assert asked == ["POST"]
