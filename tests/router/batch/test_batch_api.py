"""The Batch API through OpenAI's SDK: a real batch server and router, and a stand-in worker."""

import json
from pathlib import Path

import httpx
import openai
import pytest
from tests.router.batch.deployment import (
    ANNA,
    BORIS,
    SECRET,
    Deployment,
    create,
    line,
    results,
    to_file,
    upload,
    wait,
)
from tests.system.processes import until

from fairlead_router.batch.config import LIMITS


@pytest.fixture(scope="module")
def anna(deployment: Deployment) -> openai.OpenAI:
    return deployment.client(ANNA)


@pytest.fixture(scope="module")
def boris(deployment: Deployment) -> openai.OpenAI:
    return deployment.client(BORIS)


def test_a_batch_runs_and_its_objects_are_openais(anna: openai.OpenAI) -> None:
    file = anna.files.create(file=("in.jsonl", to_file(line(f"r{n}") for n in range(20))), purpose="batch")
    assert (file.object, file.purpose, file.filename, file.status) == ("file", "batch", "in.jsonl", "processed")
    assert file.expires_at is not None and file.expires_at > file.created_at
    batch = anna.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h", metadata={"job": "nightly"})
    assert (batch.object, batch.status, batch.endpoint, batch.metadata) == ("batch", "validating", "/v1/completions", {"job": "nightly"})
    assert batch.expires_at == batch.created_at + 86_400
    batch = wait(anna, batch)
    assert batch.status == "completed" and batch.error_file_id is None and batch.errors is None
    assert batch.request_counts is not None and batch.request_counts.model_dump() == {"total": 20, "completed": 20, "failed": 0}
    assert batch.in_progress_at and batch.finalizing_at and batch.completed_at
    assert batch.output_file_id is not None
    output = results(anna, batch.output_file_id)
    assert output.keys() == {f"r{n}" for n in range(20)}
    one = output["r7"]
    assert one["error"] is None and one["response"]["status_code"] == 200 and one["response"]["request_id"]
    assert one["response"]["body"]["choices"][0]["text"] == " word word" and one["id"].startswith("batch_req_")
    described = anna.files.retrieve(batch.output_file_id)
    assert described.purpose == "batch_output" and described.filename == f"{batch.id}_output.jsonl"
    assert described.bytes == len(anna.files.content(batch.output_file_id).content)


def test_lists_have_pages(anna: openai.OpenAI) -> None:
    made = [create(anna, [line("a")]).id for _ in range(5)]
    first = anna.batches.list(limit=2)
    assert [batch.id for batch in first.data] == made[:2:-1] and first.has_more
    assert [batch.id for batch in anna.batches.list(limit=2)][:5] == made[::-1]
    files = anna.files.list(purpose="batch", order="asc", limit=3)
    assert len(files.data) == 3 and [file.created_at for file in files.data] == sorted(file.created_at for file in files.data)
    with pytest.raises(openai.BadRequestError, match="limit"):
        anna.batches.list(limit=101)
    with pytest.raises(openai.BadRequestError, match="after"):
        anna.batches.list(after="batch_none")


def test_an_invalid_file_fails_with_line_numbers(anna: openai.OpenAI) -> None:
    lines = [json.dumps(line(f"r{n}")) for n in range(9)]
    lines[1] = '{"custom_id": "x", '
    lines[2] = json.dumps(line("r0"))
    lines[3] = json.dumps(line("get") | {"method": "GET"})
    lines[4] = json.dumps(line("other", "/v1/embeddings"))
    lines[5] = json.dumps(line("model", model="another"))
    lines[6] = json.dumps(line("stream", stream=True))
    lines[7] = ""
    lines.append(json.dumps(line("")))
    batch = anna.batches.create(input_file_id=upload(anna, "\n".join(lines).encode()), endpoint="/v1/completions", completion_window="24h")
    batch = wait(anna, batch)
    assert batch.status == "failed" and batch.failed_at and batch.errors is not None and batch.errors.data is not None
    assert [(each.line, each.code) for each in batch.errors.data] == [
        (2, "invalid_json_line"),
        (3, "duplicate_custom_id"),
        (4, "invalid_method"),
        (5, "invalid_url"),
        (6, "mismatched_model"),
        (7, "invalid_stream"),
        (10, "invalid_custom_id"),
    ]
    assert "line 1" in str(batch.errors.data[1].message)
    for data, code in (
        (to_file(line(f"r{n}") for n in range(LIMITS.max_lines + 1)), "too_many_lines"),
        (to_file([line("a", prompt="x" * LIMITS.max_line_bytes)]), "line_too_long"),
    ):
        failed = wait(anna, anna.batches.create(input_file_id=upload(anna, data), endpoint="/v1/completions", completion_window="24h"))
        assert failed.errors is not None and failed.errors.data is not None and failed.errors.data[0].code == code


def test_requests_are_refused_with_the_field_and_the_fix(deployment: Deployment, anna: openai.OpenAI) -> None:
    file = upload(anna, to_file([line("a")]))
    for fields, field in (
        ({"endpoint": "/v1/images"}, "endpoint"),
        ({"completion_window": "1y"}, "completion_window"),
        ({"completion_window": "15d"}, "completion_window"),
        ({"metadata": {"key": "x" * 513}}, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 5}}, "output_expires_after"),
    ):
        given = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"} | fields
        with pytest.raises(openai.BadRequestError, match=field):
            anna.batches.create(**given)
    with pytest.raises(openai.NotFoundError):
        anna.batches.create(input_file_id="file-none", endpoint="/v1/completions", completion_window="24h")
    with pytest.raises(openai.BadRequestError, match="purpose"):
        anna.files.create(file=("a", b"x"), purpose="fine-tune")
    with pytest.raises(openai.BadRequestError, match="empty"):
        anna.files.create(file=("a", b""), purpose="batch")
    for path in ("/v1/files/a/b/c", "/v1/files/..%2f..%2fsecret", "/v1/batches/%00", "/v1/files/x/nothing"):
        assert httpx.get(deployment.url + path, headers={"authorization": f"Bearer {ANNA}"}).status_code == 404, path


def test_a_batch_is_cancelled(anna: openai.OpenAI) -> None:
    batch = create(anna, [line("fast")] + [line(f"slow-{n}", prefill_seconds=600) for n in range(30)])
    until(lambda: anna.batches.retrieve(batch.id).request_counts.completed == 1, "the fast line has its result")  # type: ignore[union-attr]
    assert anna.batches.cancel(batch.id).status == "cancelling"
    seen = wait(anna, batch)
    assert seen.status == "cancelled" and seen.cancelling_at and seen.cancelled_at
    assert seen.request_counts is not None and seen.request_counts.model_dump() == {"total": 31, "completed": 1, "failed": 0}
    assert results(anna, seen.output_file_id).keys() == {"fast"}
    errors = results(anna, seen.error_file_id)
    assert errors.keys() == {f"slow-{n}" for n in range(30)}
    assert {(each["response"], each["error"]["code"]) for each in errors.values()} == {(None, "batch_cancelled")}
    with pytest.raises(openai.BadRequestError, match="cancelled"):
        anna.batches.cancel(batch.id)


def test_a_batch_expires_with_its_window(anna: openai.OpenAI) -> None:
    batch = create(anna, [line("fast"), *(line(f"slow-{n}", prefill_seconds=600) for n in range(9))], window="3s")
    seen = wait(anna, batch)
    assert seen.status == "expired" and seen.expired_at
    output, errors = results(anna, seen.output_file_id), results(anna, seen.error_file_id)
    assert output.keys() == {"fast"} and {each["error"]["code"] for each in errors.values()} == {"batch_expired"}
    assert len(errors) == 9


def test_an_input_file_in_use_stays_and_a_deleted_file_is_gone(anna: openai.OpenAI) -> None:
    batch = create(anna, [line("slow", prefill_seconds=600)])
    with pytest.raises(openai.BadRequestError, match=r"cancel it first"):
        anna.files.delete(batch.input_file_id)
    anna.batches.cancel(batch.id)
    wait(anna, batch)
    assert anna.files.delete(batch.input_file_id).deleted
    for use in (anna.files.retrieve, anna.files.content, anna.files.delete):
        with pytest.raises(openai.NotFoundError):
            use(batch.input_file_id)


def test_another_tenant_finds_nothing(anna: openai.OpenAI, boris: openai.OpenAI) -> None:
    batch = wait(anna, create(anna, [line("a")]))
    assert batch.output_file_id is not None
    for attempt in (
        lambda: boris.batches.retrieve(batch.id),
        lambda: boris.batches.cancel(batch.id),
        lambda: boris.files.retrieve(batch.input_file_id),
        lambda: boris.files.content(str(batch.output_file_id)),
        lambda: boris.files.delete(batch.input_file_id),
        lambda: boris.batches.create(input_file_id=batch.input_file_id, endpoint="/v1/completions", completion_window="24h"),
    ):
        with pytest.raises(openai.NotFoundError):
            attempt()
    assert not boris.batches.list().data and not boris.files.list().data
    own = wait(boris, create(boris, [line("b")]))
    assert [each.id for each in boris.batches.list()] == [own.id]


def test_lines_are_charged_to_their_tenant(deployment: Deployment, boris: openai.OpenAI) -> None:
    batch = wait(boris, create(boris, [line(f"r{n}") for n in range(5)]))
    assert batch.status == "completed"

    def charged() -> int:
        return sum("/v1/completions 200" in text and "caller=boris/batch" in text for text in deployment.router.log.splitlines())

    until(lambda: charged() >= 5, "the access log has the lines of boris", 30)


def test_only_routers_may_use_the_batch_server_and_clients_cannot_name_a_tenant(deployment: Deployment, anna: openai.OpenAI) -> None:
    batch = create(anna, [line("a")])
    for headers in ({}, {"authorization": f"Bearer {ANNA}"}, {"x-fairlead-tenant": "anna", "authorization": "Bearer wrong"}):
        assert httpx.get(f"{deployment.batch_url}/v1/batches", headers=headers).status_code == 401
    for key in (BORIS, SECRET[:-1], "x"):
        headers = {"x-fairlead-tenant": "anna", "authorization": f"Bearer {key}"}
        answer = httpx.get(f"{deployment.url}/v1/batches/{batch.id}", headers=headers)
        assert answer.status_code == (404 if key == BORIS else 401)
    unknown = httpx.get(f"{deployment.url}/v1/models", headers={"x-fairlead-tenant": "clara", "authorization": f"Bearer {SECRET}"})
    assert unknown.status_code == 403


def test_metrics_and_health_need_no_key(deployment: Deployment) -> None:
    text = httpx.get(f"{deployment.batch_url}/metrics").text
    assert 'fairlead_batch_lines_total{outcome="completed"}' in text and "fairlead_batch_concurrency_limit" in text


def test_without_a_batch_server_the_router_says_so(tmp_path: Path, deployment: Deployment, anna: openai.OpenAI) -> None:
    deployment.batch.kill()
    try:
        with pytest.raises(openai.InternalServerError, match="batch server does not answer"):
            anna.batches.list()
        with pytest.raises(openai.InternalServerError, match="batch server does not answer"):
            upload(anna, b"x" * 300_000)
    finally:
        deployment.batch.start()
        deployment.wait_for_batch_server()


def test_a_second_process_cannot_use_the_storage(deployment: Deployment, tmp_path: Path) -> None:
    second = Deployment(tmp_path, deployment.storage)
    second.batch.start()
    try:
        assert second.batch.wait(60) == 1
        assert "only one may run" in second.batch.log
    finally:
        second.batch.kill()
