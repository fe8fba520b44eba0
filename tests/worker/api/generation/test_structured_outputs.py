"""Structured output over HTTP: each field that sets a format, what is refused, and that other requests are not delayed."""

import asyncio
import json
import os
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any, cast

import jsonschema
import pytest
from openai import OpenAI
from tests.worker.api.process import WorkerProcess
from transformers import AutoTokenizer

from fairlead_worker.api.engine.client import EngineClient
from fairlead_worker.api.errors import ApiError
from fairlead_worker.api.metrics.worker_metrics import Metrics
from fairlead_worker.api.output import grammar_checker
from fairlead_worker.api.output.grammar_checker import GrammarChecker
from fairlead_worker.api.worker import Worker
from fairlead_worker.config import WorkerConfig
from fairlead_worker.config.limits import Limits
from fairlead_worker.grammar.checker import check
from fairlead_worker.grammar.compiler import Compiler
from fairlead_worker.grammar.constraint import Constraint
from fairlead_worker.ipc.messages import Load, Step
from fairlead_worker.ipc.transport import ZmqChannel

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 130}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
CHAT = [{"role": "user", "content": "hello"}]


@pytest.fixture
def worker(flagged: WorkerProcess) -> WorkerProcess:
    return flagged


def ask(worker: WorkerProcess, **fields: Any) -> dict[str, Any]:
    return worker.complete(**({"prompt": "Answer:", "max_tokens": 200, "seed": 3} | fields))["choices"][0]


def refused(worker: WorkerProcess, **fields: Any) -> dict[str, Any]:
    response = worker.post("/v1/completions", **({"prompt": "Answer:", "max_tokens": 5} | fields))
    assert response.status_code == 400, response.text
    return response.json()["error"]


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": PERSON}}},
        {"structured_outputs": {"json": PERSON}},
        {"structured_outputs": {"json": json.dumps(PERSON), "disable_any_whitespace": True}},
        {"guided_json": PERSON},
        {"guided_json": json.dumps(PERSON), "guided_whitespace_pattern": " "},
    ],
)
def test_a_schema_in_each_field(worker: WorkerProcess, fields: dict[str, Any]) -> None:
    choice = ask(worker, **fields)
    assert choice["finish_reason"] == "stop"
    jsonschema.validate(json.loads(choice["text"]), PERSON)


@pytest.mark.parametrize(
    ("fields", "form"),
    [
        ({"structured_outputs": {"regex": "[a-f]{4}-[0-9]{2}"}}, "[a-f]{4}-[0-9]{2}"),
        ({"guided_regex": "^(yes|no)$"}, "yes|no"),
        ({"structured_outputs": {"choice": ["grün", "rot 🙂"]}}, "grün|rot 🙂"),
        ({"guided_choice": ["a", "b"]}, "a|b"),
        ({"structured_outputs": {"grammar": 'root ::= "<" [xy]+ ">"'}}, "<[xy]+>"),
        ({"guided_grammar": 'start: "<" /[xy]{2}/ ">"'}, "<[xy]{2}>"),
    ],
)
def test_text_in_each_field(worker: WorkerProcess, fields: dict[str, Any], form: str) -> None:
    choice = ask(worker, max_tokens=400, **fields)
    assert choice["finish_reason"] == "stop"
    assert re.fullmatch(form, choice["text"]), choice["text"]


def test_json_object_and_tags(worker: WorkerProcess) -> None:
    for fields in ({"response_format": {"type": "json_object"}}, {"structured_outputs": {"json_object": True}}):
        choices = [ask(worker, seed=seed, **fields) for seed in range(3)]
        assert all(choice["text"].startswith("{") for choice in choices)
        assert all(isinstance(json.loads(choice["text"]), dict) for choice in choices if choice["finish_reason"] == "stop")
    tag = {"begin": "<f>", "schema": PERSON, "end": "</f>"}
    nested = {"type": "sequence", "elements": [{"type": "const_string", "value": "go "}, {"type": "regex", "pattern": "[0-9]{3}"}]}
    assert re.fullmatch("go [0-9]{3}", ask(worker, response_format={"type": "structural_tag", "format": nested})["text"])
    choice = ask(worker, response_format={"type": "structural_tag", "structures": [tag], "triggers": ["<f"]}, max_tokens=10)
    assert choice["finish_reason"] in ("length", "stop")


def test_the_openai_client_parses_what_it_asked_for(worker: WorkerProcess) -> None:
    client = OpenAI(base_url=f"{worker.url}/v1", api_key="none", max_retries=0)
    format: Any = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": PERSON}}
    whole = client.chat.completions.create(model="tiny", messages=CHAT, response_format=format, seed=1, n=3, max_tokens=400, logprobs=True)
    texts = [choice.message.content or "" for choice in whole.choices]
    for choice, text in zip(whole.choices, texts, strict=True):
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(text), PERSON)
        assert choice.logprobs is not None and choice.logprobs.content
    assert len(set(texts)) == 3
    stream = client.chat.completions.create(model="tiny", messages=CHAT, response_format=format, seed=1, n=3, max_tokens=400, stream=True)
    streamed = ["", "", ""]
    for chunk in stream:
        for each in chunk.choices:
            streamed[each.index] += each.delta.content or ""
    assert streamed == texts


def test_stop_strings_and_lengths_cut(worker: WorkerProcess) -> None:
    form = {"structured_outputs": {"regex": "(ab){50}"}}
    cut = ask(worker, stop="baba", **form)
    assert (cut["finish_reason"], cut["stop_reason"], cut["text"]) == ("stop", "baba", "a")
    short = ask(worker, max_tokens=3, **form)
    assert short["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"response_format": {"type": "yaml"}}, "response_format.type", "yaml"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "schema"),
        ({"guided_json": {"type": "array", "uniqueItems": True}}, "guided_json", "uniqueItems"),
        ({"guided_json": "{"}, "guided_json", "JSON"),
        ({"guided_regex": "("}, "guided_regex", "regex"),
        ({"guided_grammar": "start: nowhere"}, "guided_grammar", "nowhere"),
        ({"guided_choice": []}, "guided_choice", "list"),
        ({"guided_choice": ["a"], "guided_regex": "a"}, "guided_choice", "one form"),
        ({"structured_outputs": {}}, "structured_outputs", "exactly one"),
        ({"structured_outputs": {"jsn": {}}}, "structured_outputs", "jsn"),
        ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex", "string"),
        ({"guided_regex": "a" * 20001}, "guided_regex", "--limits max_grammar_bytes"),
        (
            {"structured_outputs": {"structural_tag": {"type": "structural_tag", "format": {}}}},
            "structured_outputs.structural_tag",
            "format.type: None is not supported",
        ),
    ],
)
def test_what_does_not_work_is_refused_by_name(worker: WorkerProcess, fields: dict[str, Any], param: str, says: str) -> None:
    error = refused(worker, **fields)
    assert error["param"] == param
    assert says in error["message"]


def nested(depth: int) -> str:
    return '{"type":"array","items":' * depth + "{}" + "}" * depth


def test_huge_grammars_are_refused_and_delay_no_stream(worker: WorkerProcess) -> None:
    """Grammars that would compile for minutes or overflow the stack. Meanwhile another stream and the worker continue."""
    gaps: list[float] = []

    def stream() -> None:
        with worker.stream("/v1/completions", prompt="hello", max_tokens=400, ignore_eos=True) as (_, events):
            last = time.monotonic()
            for _ in events:
                now = time.monotonic()
                gaps.append(now - last)
                last = now

    beside = threading.Thread(target=stream)
    beside.start()
    error = refused(worker, guided_regex="(a{2000}){1500}b")
    assert "--limits grammar_timeout" in error["message"] or "limit" in error["message"], error
    assert refused(worker, guided_json=nested(300))["param"] == "guided_json"
    assert "nest" in refused(worker, guided_grammar="start: " + "(" * 9000 + '"a"' + ")" * 9000)["message"]
    assert worker.client.get("/health").status_code == 200
    beside.join()
    assert len(gaps) > 100
    assert ask(worker, guided_choice=["still here"])["text"] == "still here"


async def test_tenants_take_turns_to_have_grammars_checked(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checker's process is stopped meanwhile, as if the first grammar took for ever."""
    monkeypatch.setattr(grammar_checker, "MAX_WAITING", 5)
    tokenizer = AutoTokenizer.from_pretrained(model)
    config = WorkerConfig(model=f"file://{model}")
    checker = GrammarChecker(config, tokenizer.backend_tokenizer.to_str(), len(tokenizer), (tokenizer.eos_token_id,))
    done, seconds = list[str](), list[float]()

    async def compile(tenant: str, text: str) -> None:
        assert await checker.compile(Constraint("regex", text, "regex"), tenant, seconds.append)
        done.append(text)

    await compile("", "start")
    process = checker._process
    assert process is not None and 0 < seconds[0] < config.limits.grammar_timeout
    os.kill(process.pid, signal.SIGSTOP)
    asking = [asyncio.create_task(compile("anna", f"anna{number}")) for number in range(5)]
    await asyncio.sleep(0)
    asking.append(asyncio.create_task(compile("boris", "boris")))
    await asyncio.sleep(0)
    with pytest.raises(ApiError, match="5 of your requests") as refusal:
        await compile("anna", "anna5")
    assert refusal.value.status == 429
    os.kill(process.pid, signal.SIGCONT)
    await asyncio.gather(*asking)
    assert done.index("boris") <= 3, "after the one that is being checked and one more of anna's"
    assert len(seconds) == 7
    await compile("boris", "anna0")
    assert len(seconds) == 7, "a checked grammar costs nothing"
    checker.close()
    await process.wait()


def test_an_answer_tells_the_router_what_its_grammar_has_cost(worker: WorkerProcess) -> None:
    heavy = {"anyOf": [{"type": "object", "properties": {f"p{n}": {"type": "string"}}, "required": [f"p{n}"]} for n in range(200)]}
    for fields, status in (({"guided_json": heavy, "max_tokens": 1}, 200), ({"guided_regex": "(x{2000}){1500}y"}, 400)):
        answer = worker.post("/v1/completions", prompt="x", **fields)
        assert answer.status_code == status and int(answer.headers["x-fairlead-cpu-ms"]) > 0, fields
    assert "x-fairlead-cpu-ms" not in worker.post("/v1/completions", prompt="x", max_tokens=1).headers


async def test_a_check_that_is_killed_costs_its_cpu_time(model: Path) -> None:
    """It waits for its turn of a core until its time is over."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    config = WorkerConfig(model=f"file://{model}", limits=Limits(grammar_timeout=1))
    checker = GrammarChecker(config, tokenizer.backend_tokenizer.to_str(), len(tokenizer), (tokenizer.eos_token_id,))
    seconds = list[float]()
    process = await checker._ensure_process()
    os.kill(process.pid, signal.SIGSTOP)
    with pytest.raises(ApiError, match="not compiled within 1 s"):
        await checker.compile(Constraint("regex", "x", "regex"), "", seconds.append)
    assert 0 <= seconds[0] < 0.2


def test_a_grammar_costs_its_compilation_in_the_engine_too(model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    compiler = Compiler(tokenizer.backend_tokenizer.to_str(), len(tokenizer), (tokenizer.eos_token_id,))
    properties = {f"p{number}": {"type": "string"} for number in range(500)}
    verdict = check(compiler, Constraint("json", json.dumps({"properties": properties, "required": list(properties)}), "x"))
    began = time.process_time()
    compiler.matcher(verdict.grammar)
    assert verdict.cpu_seconds > (time.process_time() - began) / 4


def test_the_checkers_death_is_survived(worker: WorkerProcess) -> None:
    assert ask(worker, guided_choice=["before"])["text"] == "before"
    children = Path(f"/proc/{worker.process.pid}/task/{worker.process.pid}/children").read_text().split()
    (checker,) = [int(pid) for pid in children if b"grammar.checker" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    os.kill(checker, signal.SIGKILL)
    texts = [worker.post("/v1/completions", prompt="x", guided_choice=[f"after {n}"]) for n in range(2)]
    assert texts[1].json()["choices"][0]["text"] == "after 1"


async def test_a_request_whose_grammar_is_being_checked_counts_as_waiting() -> None:
    client = EngineClient(cast(ZmqChannel, None))
    worker = Worker(WorkerConfig(model="hf://a/b"), client, Metrics(client, "m", {}), "h:1")
    tried = asyncio.Event()

    class Checks:
        async def compile(self, *_: Any) -> str:
            await tried.wait()
            return "start: /a/"

    worker._grammars = cast(GrammarChecker, Checks())
    asking = asyncio.create_task(worker.compile_grammar(Constraint("regex", "a", "test"), "", lambda seconds: None))
    await asyncio.sleep(0)
    client._handle_step(Step(load=Load(waiting=1)))
    assert client.state.load.waiting == 2
    tried.set()
    assert await asking == "start: /a/"
    client._handle_step(Step(load=Load(waiting=1)))
    assert client.state.load.waiting == 1
