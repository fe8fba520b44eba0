"""Responses with `store: true`: they are read, continued and deleted, by their tenant only, and their number and size are bounded."""

from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest
from tests.servers.redis_server import RedisServer
from tests.worker.api.process import WorkerProcess

from fairlead_common.response_keys import HEADER, ResponseKeys, derive_keys, new_id

ASK: dict[str, Any] = {"input": "one two", "max_output_tokens": 6, "temperature": 0, "store": True}
Start = Callable[..., WorkerProcess]


def create(worker: WorkerProcess, tenant: str = "", **fields: Any) -> dict[str, Any]:
    response = worker.client.post("/v1/responses", json=ASK | fields, headers={"x-fairlead-tenant": tenant} if tenant else {})
    assert response.status_code == 200, response.text
    made: dict[str, Any] = response.json()
    return made


def read(worker: WorkerProcess, path: str, tenant: str = "", method: str = "GET") -> httpx.Response:
    headers = {"x-fairlead-tenant": tenant} if tenant else {}
    return worker.client.request(method, f"/v1/responses/{path}", headers=headers)


def test_a_stored_response_is_read_and_deleted(shared: WorkerProcess) -> None:
    made = create(shared)
    assert made["store"] is True and made["id"].startswith("resp_")
    assert read(shared, made["id"]).json() == made
    items = read(shared, f"{made['id']}/input_items").json()["data"]
    assert [item["content"] for item in items] == [[{"type": "input_text", "text": "one two"}]]
    assert read(shared, made["id"], method="DELETE").json() == {"id": made["id"], "object": "response", "deleted": True}
    for path, method in ((made["id"], "GET"), (made["id"], "DELETE"), (f"{made['id']}/input_items", "GET")):
        assert read(shared, path, method=method).status_code == 404


def test_a_conversation_continues_from_a_stored_response(shared: WorkerProcess) -> None:
    """The prompt is that of the whole conversation in one request, also of three turns, without the earlier instructions."""
    first = create(shared, instructions="Be brief.")
    second = create(shared, input="three", previous_response_id=first["id"])
    third = create(shared, input=[{"role": "user", "content": "four"}], previous_response_id=second["id"])
    assert second["previous_response_id"] == first["id"]
    said: list[Any] = [{"role": "user", "content": "one two"}, *first["output"], {"role": "user", "content": "three"}]
    for answer, conversation in ((second, said), (third, [*said, *second["output"], {"role": "user", "content": "four"}])):
        whole = create(shared, input=conversation, store=False)
        assert whole["store"] is False and whole["usage"]["input_tokens"] == answer["usage"]["input_tokens"]
        assert [item.get("content") for item in whole["output"]] == [item.get("content") for item in answer["output"]]
    assert len(read(shared, f"{third['id']}/input_items").json()["data"]) == 5


def test_the_end_of_a_stream_comes_after_the_response_is_stored(shared: WorkerProcess) -> None:
    sdk = openai.OpenAI(base_url=f"{shared.url}/v1", api_key="none", _strict_response_validation=True)
    *_, last = list(sdk.responses.create(model="tiny", stream=True, **ASK))
    assert last.type in ("response.completed", "response.incomplete")
    stored = sdk.responses.retrieve(last.response.id)
    assert stored.output_text == last.response.output_text and stored.id == last.response.id
    assert [item.id for item in sdk.responses.input_items.list(stored.id)] == ["msg_0"]
    with pytest.raises(openai.BadRequestError, match="only a background response can be cancelled"):
        sdk.responses.cancel(stored.id)
    sdk.responses.delete(stored.id)
    with pytest.raises(openai.NotFoundError):
        sdk.responses.retrieve(stored.id)


def test_tenants_cannot_reach_each_others_responses(shared: WorkerProcess) -> None:
    made = create(shared, tenant="first")
    for tenant in ("", "second"):
        for path, method in (("", "GET"), ("", "DELETE"), ("/input_items", "GET"), ("/cancel", "POST")):
            assert read(shared, made["id"] + path, tenant, method).status_code == 404
        headers = {"x-fairlead-tenant": tenant} if tenant else {}
        refused = shared.client.post("/v1/responses", json=ASK | {"previous_response_id": made["id"]}, headers=headers)
        assert (refused.status_code, refused.json()["error"]["param"]) == (404, "previous_response_id")
    assert read(shared, made["id"], "first").json() == made


@pytest.mark.parametrize("id", ["resp_1", "resp_" + "0" * 32, "resp_0_" + "0" * 32, "resp_1:x" + "0" * 32, ".."])
def test_an_unknown_id_is_not_found(shared: WorkerProcess, id: str) -> None:
    assert read(shared, id).status_code == 404
    assert shared.post("/v1/responses", **ASK, previous_response_id=id).status_code == 404


def test_the_number_is_bounded_and_they_expire_and_a_worker_whose_redis_is_away_serves_and_stores_nothing(start: Start) -> None:
    own = RedisServer().start()
    worker = start("--limits", "stored_responses=2", FAIRLEAD_REDIS_URL=own.url, FAIRLEAD_INDEX_NAMESPACE="test/bounded").wait_ready()
    ids = [create(worker)["id"] for _ in range(3)]
    assert [read(worker, id).status_code for id in ids] == [404, 200, 200]
    client = own.client()
    assert len(client.keys("*bounded*answers:r*")) == 2
    assert all(0 < client.ttl(key) <= 86_400 for key in client.keys("*bounded*answers:*"))
    own.stop()
    answer = create(worker)
    assert answer["store"] is False and answer["usage"]["output_tokens"] > 0
    assert read(worker, ids[-1]).status_code == 503
    assert worker.client.get("/ready").status_code == 200
    assert worker.stop() == 0


def test_without_redis_nothing_is_stored_and_the_answer_says_so(flagged: WorkerProcess) -> None:
    assert create(flagged)["store"] is False
    id = new_id()
    refused = flagged.post("/v1/responses", **ASK, previous_response_id=id)
    assert refused.status_code == 400 and "needs stored responses" in refused.json()["error"]["message"]
    assert read(flagged, id).status_code == 404


def test_a_worker_stores_and_reads_with_the_routers_keys(shared: WorkerProcess) -> None:
    """It has no key of another response, whatever tenant the request names."""

    def header(keys: ResponseKeys) -> dict[str, str]:
        return {HEADER.decode(): keys.encode().decode()}

    secret, id = b"a secret that only routers have.", new_id()
    keys, both = derive_keys(secret, "anna", id), derive_keys(secret, "anna", new_id(), id)
    made = shared.client.post("/v1/responses", json=ASK, headers=header(keys)).json()
    assert made["id"] == id and made["store"] is True
    assert read(shared, id, "anna").status_code == 404
    url = f"/v1/responses/{id}"
    for other in (derive_keys(secret, "boris", id), derive_keys(secret, "anna", new_id())):
        assert shared.client.get(url, headers=header(other)).status_code == 404
    more = shared.client.post("/v1/responses", json=ASK | {"previous_response_id": id}, headers=header(both)).json()
    assert more["id"] == both.first_id and more["previous_response_id"] == id
    assert shared.client.get(url, headers=header(keys)).json() == made
    for wrong in ("x", f"{keys.tag} resp_1=00", f"{keys.tag} {id}={'0' * 63}"):
        refused = shared.client.get(url, headers={HEADER.decode(): wrong})
        assert refused.status_code == 400 and "X-Fairlead-Response-Keys" in refused.json()["error"]["message"]
