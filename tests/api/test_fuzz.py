"""A short run of the fuzzer (`make fuzz-api` sends 20,000): no 5xx, no hang, no leak, and valid requests beside it succeed."""

from tests.api.fleet import Pair
from tests.api.fuzz import Fuzz

COUNT = 300


async def test_no_request_breaks_a_process_or_another_request(pair: Pair) -> None:
    document = pair.worker.client.get("/openapi.json").json()
    report = await Fuzz(pair, document, seed=3).run(COUNT)
    assert not report.faults, "\n".join(report.faults[:5])
    assert report.good >= 4
    assert report.statuses["200"] and report.statuses["400"], "some were valid, and some were not"
