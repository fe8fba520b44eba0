"""Pure rules: how lines are found and validated, how many are in flight, and pages of lists."""

import asyncio
import codecs
import json
import sys
from dataclasses import dataclass

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.router.batch.deployment import line, to_file

from fairlead_router.batch.line_client import Answer
from fairlead_router.batch.pacing import ConcurrencyLimit, Slots
from fairlead_router.batch.records import BatchRecord
from fairlead_router.batch.requests import choose_page, window_seconds
from fairlead_router.batch.results import answer_line, read_result, unanswered_line
from fairlead_router.batch.validation import MAX_PROBLEMS, LineSplitter, Validator
from fairlead_router.errors import ApiError


@given(
    parts=st.lists(st.sampled_from([b"", b"  ", b"{}", b'{"a": 1}', b"x" * 50]), max_size=12), size=st.integers(1, 40), end=st.booleans()
)
def test_lines_are_found_whatever_the_chunks(parts: list[bytes], size: int, end: bool) -> None:
    data = b"\n".join(parts) + (b"\n" if end and parts else b"")
    splitter, found = LineSplitter(100), []
    for at in range(0, len(data), size):
        found += splitter.feed(data[at : at + size], is_last=at + size >= len(data))
    assert found == [(number, part) for number, part in enumerate(parts, start=1) if part.strip()]
    index = splitter.index
    pieces = [data[start : start + length] for start, length in zip(index.starts, index.lengths, strict=True)]
    assert pieces == [text for _, text in found] and list(index.numbers) == [number for number, _ in found]


@given(size=st.integers(1, 12), empty=st.booleans())
def test_a_byte_order_mark_belongs_to_no_line(size: int, empty: bool) -> None:
    data = codecs.BOM_UTF8 + (b"\n" if empty else b"") + b"{}\n[]"
    splitter, found = LineSplitter(100), []
    for at in range(0, len(data), size):
        found += splitter.feed(data[at : at + size], is_last=at + size >= len(data))
    assert found == [(1 + empty, b"{}"), (2 + empty, b"[]")]
    index = splitter.index
    assert [data[start : start + length] for start, length in zip(index.starts, index.lengths, strict=True)] == [b"{}", b"[]"]


@pytest.mark.parametrize("text", ["\u0085", "\u2028", "a\\\u2029b", "é – 水\n"])
def test_a_result_is_one_line_for_every_reader(text: str) -> None:
    """Python's `splitlines`, and httpx's `iter_lines`, also end lines at U+0085, U+2028 and U+2029."""
    batch = BatchRecord("batch_1", "", "file-1", "/v1/completions", "24h", 0, 9, "file-2", "file-3", 9)
    answer = Answer(200, "id", msgspec.json.encode({"text": text}))
    answered = answer_line(batch, 3, text, answer)
    unanswered = unanswered_line(batch, 3, text, "batch_expired", "")
    for each in (answered, unanswered):
        (only,) = each.decode().splitlines()
        assert json.loads(only)["custom_id"] == text and read_result(each)[0] == 3
    assert json.loads(answered)["response"]["body"] == {"text": text}


@given(long_at=st.integers(0, 5), size=st.integers(1, 40))
def test_a_line_that_is_too_long_is_found_without_keeping_it(long_at: int, size: int) -> None:
    data = b"".join((b"y" * 300 if number == long_at else b"{}") + b"\n" for number in range(6))
    splitter = LineSplitter(100)
    for at in range(0, len(data), size):
        list(splitter.feed(data[at : at + size], is_last=at + size >= len(data)))
        if splitter.too_long is not None:
            break
    assert splitter.too_long == long_at + 1


@pytest.mark.parametrize("unit", [b"\n", b"\r\n", b" \n\t\n", b" "])
def test_empty_lines_cost_no_step_of_python_each(unit: bytes) -> None:
    steps = 0

    def count(frame: object, event: str, argument: object) -> object:
        nonlocal steps
        steps += 1
        return count

    data = b"{}\n" + unit * (100_000 // len(unit)) + b"\n[]"
    splitter = LineSplitter(1 << 20)
    before = sys.gettrace()
    sys.settrace(count)  # type: ignore[arg-type]
    try:
        found = list(splitter.feed(data, is_last=True))
    finally:
        sys.settrace(before)
    assert found == [(1, b"{}"), (1 + data.count(b"\n"), b"[]")] and steps < 200


def test_lines_are_not_split_once_nothing_more_is_reported() -> None:
    splitter, validator = LineSplitter(1000), Validator("/v1/completions", 10)
    validator.check_all(splitter.feed(b"1\n" * 500_000))
    assert validator.is_done and len(splitter.index) == MAX_PROBLEMS
    splitter, validator = LineSplitter(1000), Validator("/v1/completions", 10)
    validator.check_all(splitter.feed(to_file(line(f"r{n}") for n in range(1000))))
    assert [each.code for each in validator.problems] == ["too_many_lines"] and len(splitter.index) == 11


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (b"[" * 100_000, "invalid_request"),
        (json.dumps(line("a", messages="")).encode()[:-1] + b',"x":' + b'{"a":' * 100_000, "invalid_json_line"),
        (json.dumps(line("x" * 100_000)).encode(), "invalid_custom_id"),
        (json.dumps(line("a", model="m" * 100_000)).encode(), "invalid_model"),
        (json.dumps(line("a") | {"url": "u" * 100_000}).encode(), "invalid_url"),
        (json.dumps(line("a") | {"method": "m" * 100_000}).encode(), "invalid_method"),
        (json.dumps(line("a") | {"body": {"k" * 100_000: 1}}).encode(), "invalid_body"),
    ],
)
def test_what_is_kept_of_an_invalid_line_is_bounded(text: bytes, code: str) -> None:
    """The problems are part of the batch's record, and so is its model."""
    validator = Validator("/v1/completions", 10)
    validator.check_all([(number, text) for number in range(1, 3)])
    assert validator.problems[0].code == code and len(msgspec.json.encode(validator.problems)) < 4000
    assert len(validator.model or "") < 1000 and sum(map(len, validator._lines_of)) < 1000


def test_a_file_of_problems_reports_a_bounded_number() -> None:
    validator = Validator("/v1/completions", 10_000)
    validator.check_all([(number, b"{") for number in range(1, 5000)])
    assert len(validator.problems) == MAX_PROBLEMS and validator.is_done


def test_a_good_file_has_no_problems_and_one_model() -> None:
    splitter, validator = LineSplitter(1000), Validator("/v1/completions", 3)
    validator.check_all(splitter.feed(to_file(line(f"r{n}") for n in range(3)), is_last=True))
    validator.finish(splitter, 1000)
    assert validator.problems == [] and validator.model == "tiny"
    validator.check_all([(4, json.dumps(line("r4")).encode())])
    assert [(each.code, each.line) for each in validator.problems] == [("too_many_lines", 4)]


def test_an_empty_file_is_a_problem() -> None:
    splitter, validator = LineSplitter(1000), Validator("/v1/completions", 3)
    validator.check_all(splitter.feed(b"\n \n", is_last=True))
    validator.finish(splitter, 1000)
    assert [each.code for each in validator.problems] == ["empty_file"]


@given(answers=st.lists(st.tuples(st.booleans(), st.floats(0, 5)), max_size=300), maximum=st.integers(1, 64))
def test_the_limit_stays_in_its_bounds_and_halves_once_for_a_round(answers: list[tuple[bool, float]], maximum: int) -> None:
    limit, now = ConcurrencyLimit(maximum), 0.0
    for is_busy, seconds in answers:
        now += 0.1
        before = limit.limit
        if is_busy:
            limit.record_busy(now - 0.01, now, seconds)
            first = limit.limit
            limit.record_busy(now - 0.01, now, seconds)  # sent before the limit was halved
            assert limit.limit == first >= before / 2 and limit.paused_until >= now + seconds - 1e-9
        else:
            limit.record_success()
            assert before <= limit.limit <= before + 1
        assert 1 <= limit.limit <= maximum


def test_it_reaches_the_maximum_while_the_service_answers() -> None:
    limit = ConcurrencyLimit(64)
    for _ in range(3000):
        limit.record_success()
    assert limit.limit == 64


async def test_free_slots_go_to_tenants_in_turn_and_none_is_lost() -> None:
    slots = Slots(ConcurrencyLimit(1))
    order: list[str] = []

    async def use(tenant: str) -> None:
        await slots.acquire(tenant)
        order.append(tenant)
        slots.release()

    await slots.acquire("first")
    tasks = [asyncio.create_task(use("anna")) for _ in range(4)] + [asyncio.create_task(use("boris")) for _ in range(2)]
    await asyncio.sleep(0)
    tasks[1].cancel()
    slots.release()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert order == ["anna", "boris", "anna", "boris", "anna"] or order == ["anna", "boris", "boris", "anna", "anna"]
    assert slots.in_use == 0


async def test_slots_wait_for_the_end_of_a_pause() -> None:
    now = 100.0
    slots = Slots(ConcurrencyLimit(4), clock=lambda: now)
    slots.limit.record_busy(now, now, 3600)
    waiting = asyncio.create_task(slots.acquire("anna"))
    await asyncio.sleep(0)
    assert not waiting.done() and slots.in_use == 0
    now += 3601
    other = asyncio.create_task(slots.acquire("boris"))
    await asyncio.gather(waiting, other)
    assert slots.in_use == 2
    slots.close()


@dataclass
class Record:
    id: str


@given(count=st.integers(0, 30), limit=st.integers(1, 10), order=st.sampled_from(["asc", "desc"]))
def test_pages_contain_every_record_once(count: int, limit: int, order: str) -> None:
    records = [Record(f"r{n}") for n in range(count)]
    seen: list[Record] = []
    query = {"limit": str(limit), "order": order}
    while True:
        page, has_more = choose_page(records, query, 20, 100)
        seen += page
        if not has_more:
            break
        query["after"] = page[-1].id
    assert seen == (records if order == "desc" else records[::-1])


def test_windows() -> None:
    assert [window_seconds(text) for text in ("24h", "90s", "14d", "30m")] == [86_400, 90, 14 * 86_400, 1800]
    for text in ("", "0h", "24", "15d", "-1h", "1.5h", "24h "):
        with pytest.raises(ApiError, match="completion_window"):
            window_seconds(text)
