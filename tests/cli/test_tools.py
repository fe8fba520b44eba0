"""`fairlead doctor` and `fairlead status` without running processes, and with a server that is no router."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import StringIO
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console
from tests.operator.support.stub_server import StubServer

from fairlead.console import fit_table
from fairlead.errors import UserError
from fairlead.local.rundir import PodRecord, RunRecord, make_run_directory, write_record
from fairlead.main import COMMANDS, main
from fairlead.tools.doctor import check_machine, native_kernels, processor_level
from fairlead.tools.score import read_score, request_body
from fairlead.tools.status import read_workers
from fairlead_worker.native import build, library
from fairlead_worker.platform import isa

PICTURE = {
    "service": "qwen",
    "policy": "PrefixAware",
    "index": "ok",
    "index_read": "mirror",
    "workers": [
        {
            "pod": "qwen-worker-0",
            "address": "127.0.0.1:1",
            "ready": True,
            "draining": True,
            "usable": False,
            "reason": "it drains [SIGTERM]",
            "load": {"running": 3},
            "prediction": {"answers": 40, "over": 0.02, "under": 0.31, "recalls": 1},
        }
    ],
}

TERMS = {"backlog": 1.0, "reserved": 0.5, "work": 0.25, "step": 0.02, "price": 0.125}
SCORES = {
    "prompt_tokens": 1234,
    "source": "mirror",
    "workers": [
        {
            "pod": "qwen-worker-0",
            "address": "127.0.0.1:1",
            "cached_tokens": 64,
            "terms": TERMS,
            "ttft": 1.77,
            "score": 1.895,
            "fits": False,
        }
    ],
}


@pytest.fixture
def router() -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps(PICTURE if self.path == "/fairlead/workers" else []).encode()
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self) -> None:
            sent = json.loads(self.rfile.read(int(self.headers["content-length"])))
            wrong = {"error": {"message": "The request body must be a JSON object."}}
            body = json.dumps(SCORES if sent in ({"prompt": "hello"}, {"messages": []}) else wrong).encode()
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def test_doctor_names_what_local_mode_needs() -> None:
    findings = {finding.what: finding for finding in check_machine()}
    assert all(not finding.advice for finding in findings.values() if finding.needed), findings
    assert findings.keys() >= {"Python", "torch", "Redis server", "GPU", "kubectl"}


def test_doctor_reports_whether_the_native_kernels_are_built_and_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(isa, "cpu_level", lambda: "amx")
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    assert {finding.what for finding in check_machine()} >= {"native kernels"}
    monkeypatch.setattr(build, "LIBRARY", tmp_path / "none.so")
    missing = native_kernels()
    assert missing.found == "not built" and "python -m fairlead_worker.native.build" in missing.advice and not missing.needed
    monkeypatch.setattr(build, "LIBRARY", tmp_path / "old.so")
    monkeypatch.setattr(build, "STAMP", tmp_path / "old.key")
    (tmp_path / "old.so").write_bytes(b"")
    (tmp_path / "old.key").write_text("of other sources")
    assert native_kernels().found == "built from other sources"
    (tmp_path / "old.key").write_text(build.key())
    monkeypatch.setattr(library, "native", lambda: None)
    assert "does not load" in native_kernels().found
    monkeypatch.setattr(library, "native", lambda: object())
    assert native_kernels().advice == ""
    monkeypatch.setattr(isa, "cpu_level", lambda: "none")
    assert native_kernels().found == "none at CPU level none"


def test_doctor_names_the_cpu_level_and_the_cost_of_missing_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isa, "cpu_flags", lambda: isa.NEEDED["avx2"])
    monkeypatch.setattr(isa, "cpu_level", lambda: "avx2")
    monkeypatch.setenv(isa.VARIABLE, "avx2")
    found = processor_level()
    assert found.found == "avx2, forced by FAIRLEAD_CPU_ISA" and not found.needed
    assert found.advice.startswith("prompts take about 2.2 times as long") and "the processor lacks avx512_bf16, " in found.advice
    monkeypatch.setattr(isa, "cpu_level", lambda: "avx512_bf16")
    assert processor_level().advice == ""


def test_doctor_continues_with_an_invalid_cpu_level(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv(isa.VARIABLE, "sse4")
    isa.cpu_level.cache_clear()
    try:
        with pytest.raises(SystemExit) as left:
            main(["doctor"])
    finally:
        isa.cpu_level.cache_clear()
    shown = " ".join(capsys.readouterr().out.split())
    assert left.value.code == 1 and "local mode cannot run: CPU level" in shown and "Redis server" in shown


def test_status_shows_a_routers_workers(router: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["status", "--url", f"{router}/v1"])
    shown = capsys.readouterr().out
    assert left.value.code == 1, "its only worker drains"
    assert "qwen-worker-0" in shown and "Draining" in shown and "index ok (mirror)" in shown and "-31%" in shown
    assert "qwen-worker-0: it drains [SIGTERM]" in shown


def test_status_shows_the_terms_of_the_score_for_a_prompt(router: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    chat = tmp_path / "chat.json"
    chat.write_text('{"messages": []}')
    for prompt in ("hello", f"@{chat}"):
        with pytest.raises(SystemExit) as left:
            main(["status", "--url", router, "--prompt", prompt])
        shown = capsys.readouterr().out
        assert left.value.code == 0 and "1234 tokens" in shown and "qwen-worker-0" in shown and "too few free KV pages" in shown
        assert all(f"{value:.3f}" in shown for value in (*TERMS.values(), 1.895, 1.77))


def test_status_explains_a_prompt_that_it_cannot_score(router: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["status", "--prompt", "hello"])
    assert left.value.code == 2 and "needs --url" in capsys.readouterr().err
    page = {"workers": [], "prompt_tokens": 1, "source": "local"}
    with StubServer(lambda method, path, body: (200, page)) as server, pytest.raises(SystemExit) as left:
        main(["status", "--url", server.url, "--prompt", "hello"])
    assert left.value.code == 1 and "no workers" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"@/no/such: .*Give a text, or @ and a file"):
        request_body("@/no/such")
    with pytest.raises(UserError, match="must be a JSON object"):
        read_score(router, b"[]")


def test_status_names_an_address_without_a_router(router: str) -> None:
    with pytest.raises(UserError, match=r"127\.0\.0\.1:9/fairlead/workers"):
        read_workers("http://127.0.0.1:9")
    with pytest.raises(UserError, match="not a Fairlead router"):
        read_workers(f"{router}/elsewhere")
    with pytest.raises(UserError, match=r"--url 127\.0\.0\.1:9: must be http://HOST"):
        read_workers("127.0.0.1:9")


def test_an_unknown_argument_is_named_with_its_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["status", "--nonsense"])
    assert left.value.code == 2
    assert capsys.readouterr().err == "fairlead status: No such option: --nonsense. `fairlead status --help` lists the options\n"


def test_a_misspelt_command_gets_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["statu"])
    assert left.value.code == 2 and "'status'" in capsys.readouterr().err


def test_the_version_and_grouped_help_import_no_command(capsys: pytest.CaptureFixture[str]) -> None:
    code = "import sys; from fairlead.main import main\ntry: main(['--help'])\nfinally: print(*sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "Measure" in shown and "make-model" in shown
    assert not {"httpx", "aiohttp", "pydantic_settings", "fairlead.local.up"} & set(shown.split())
    with pytest.raises(SystemExit) as left:
        main(["--version"])
    assert left.value.code == 0 and capsys.readouterr().out.startswith("fairlead 0.")


@pytest.mark.parametrize("command", [command.name for command in COMMANDS])
def test_the_help_of_each_command_has_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main([command, *(["serve"] if command == "bench" else []), "--help"])
    assert left.value.code == 0 and f"fairlead {command}" in capsys.readouterr().out.partition("Examples")[2]


def test_a_narrow_table_keeps_names_whole_and_leaves_out_columns() -> None:
    console = Console(width=40, file=StringIO())
    rows = [["qwen-worker-5d9c-x7", "Ready", "12", "10.0.0.1:8000"], ["qwen-worker-5d9c-x8", "Ready", "3", "10.0.0.2:8000"]]
    console.print(fit_table(["POD", "STATE", "RUNNING", "ADDRESS"], rows, left=2, width=40, optional=["ADDRESS"]))
    assert isinstance(console.file, StringIO)
    shown = console.file.getvalue()
    assert "worker-5d9c-x7" in shown and "worker-5d9c-x8" in shown and "10.0.0.1" not in shown and "…" not in shown


def test_top_and_explain_show_one_router(router: str, capsys: pytest.CaptureFixture[str]) -> None:
    for words, status in (["top", "--once", "--interval", "0.1"], 0), (["explain"], 1):
        with pytest.raises(SystemExit) as left:
            main([*words, "--url", router])
        assert left.value.code == status and "qwen-worker-0" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["status", "explain", "top"])
def test_a_name_beside_a_router_is_refused(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main([command, "qwen", "--url", "http://127.0.0.1:9"])
    assert left.value.code == 2 and "leave out qwen" in capsys.readouterr().err


def test_a_worker_of_an_earlier_release_shows_its_load_without_its_key() -> None:
    load = {"pod": "worker", "address": "127.0.0.1:1", "ready": True, "draining": False, "max_running": 4}
    with StubServer(lambda method, path, body: (200, load) if path == "/load" else (401, {})) as server:
        with pytest.raises(SystemExit) as left:
            main(["status", "--url", server.url])
        [worker] = read_workers(server.url)["workers"]
    assert left.value.code == 0 and worker["pod"] == "worker" and worker["load"]["max_running"] == 4


def test_explain_asks_for_the_key_of_a_local_router(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with StubServer(lambda method, path, body: (401, {})) as server:
        write_record(make_run_directory("small"), RunRecord(os.getpid(), "fairlead up -f small.yaml", {"small": server.url}))
        with pytest.raises(SystemExit) as left:
            main(["explain", "small"])
    shown = capsys.readouterr().out
    assert left.value.code == 1 and "Give --api-key-file with a key of this service." in shown and "still runs" not in shown


def _worker(is_ready: bool) -> PodRecord:
    return PodRecord(
        name="small-worker-0",
        service="small",
        component="worker",
        phase="Ready" if is_ready else "CrashLoopBackOff",
        reason="" if is_ready else "exit status 1",
        percent=None,
        ready=is_ready,
        restarts=3,
        address="127.0.0.1:9",
        log="/logs/w.log",
    )


@pytest.mark.parametrize(("is_ready", "status"), [(True, 0), (False, 1)])
def test_status_fails_while_a_local_pod_is_not_ready(
    is_ready: bool, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with StubServer(lambda method, path, body: (200, {"workers": []})) as server:
        write_record(make_run_directory("small"), RunRecord(os.getpid(), "", {"small": server.url}, {"small": 1}, [_worker(is_ready)]))
        for flags in ([], ["-o", "json"]):
            with pytest.raises(SystemExit) as left:
                main(["status", "small", *flags])
            assert left.value.code == status
            assert ("exit status 1" in capsys.readouterr().out) == (not is_ready and not flags)


def test_explain_names_the_log_of_a_local_pod_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    record = RunRecord(
        os.getpid(),
        "fairlead up -f small.yaml",
        {"small": "http://127.0.0.1:9"},
        {"small": 1},
        [_worker(is_ready=False)],
        manifest="small.yaml",
    )
    write_record(make_run_directory("small"), record)
    with pytest.raises(SystemExit) as left:
        main(["explain", "small"])
    shown = capsys.readouterr().out
    assert (
        left.value.code == 1
        and "CrashLoopBackOff exit status 1, 3 restarts" in shown
        and "Read /logs/w.log and correct its cause in small.yaml and save" in shown
    )


def test_status_with_nothing_running_says_what_to_do(
    tmp_path: object, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))  # without a kubeconfig
    monkeypatch.delenv("KUBECONFIG", raising=False)
    with pytest.raises(SystemExit) as left:
        main(["status"])
    assert left.value.code == 1 and "fairlead up -f FILE" in capsys.readouterr().out


TRACE = """{"format":"fairlead-schedule-1","page_size":4,"chunked_prefill_size":8}
{"step":0,"at":0.01,"seconds":0.01,"rows":[["r0",0,8,false]]}
{"step":1,"at":0.02,"seconds":0.01,"rows":[["r0",8,2,true],["r1",0,1,true]]}
{"step":2,"at":0.03,"seconds":0.01,"rows":[["r0",10,1,true],["r1",1,1,true],["r2",0,6,true]]}
{"step":3,"at":0.05,"seconds":0.02,"rows":[["r0",0,8,false],["r2",6,1,true]]}
{"step":4,"at":0.06,"seconds":0.01,"rows":[["r0",8,4,true],["r2",7,1,"""


def test_a_schedule_becomes_a_chrome_trace(tmp_path: Path) -> None:
    trace, out = tmp_path / "trace", tmp_path / "trace.json"
    trace.write_text(TRACE)
    assert _schedule(str(trace), "--perfetto", str(out)) == 0
    events = json.loads(out.read_text())["traceEvents"]
    steps = [event for event in events if event["ph"] == "X" and event["pid"] == 1]
    assert [step["name"] for step in steps] == ["prefill", "prefill", "mixed", "mixed"]
    assert [step["ts"] for step in steps] == [0, 10_000, 20_000, 30_000] and steps[3]["dur"] == 20_000
    assert {event["args"]["name"] for event in events if event["ph"] == "M"} == {"engine", "steps", "requests", "r0", "r1", "r2"}


def _schedule(*arguments: str) -> int | str | None:
    with pytest.raises(SystemExit) as left:
        main(["schedule", *arguments])
    return left.value.code


def test_schedule_draws_prefills_and_decodes_of_each_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace"
    path.write_text(TRACE)
    assert _schedule(str(path), "--width", "40") == 0
    shown = capsys.readouterr().out
    lines = {words[0]: line for line in shown.splitlines() if (words := line.split())}
    assert lines["r0"] == "r0      ▒█·▒", "two chunks, a decode, and after a preemption from the beginning"
    assert lines["r1"] == "r1       █·", "a prompt of one token is no decode"
    assert lines["r2"] == "r2        █·"
    assert "4 steps (2 mixed), 3 requests" in shown
    assert _schedule(str(path), "--list", "--steps", "1:2") == 0
    assert "prefill r2[0:6]*  decode r0 r1" in capsys.readouterr().out
    assert _schedule(str(path), "--svg", str(tmp_path / "out.svg")) == 0
    assert ElementTree.parse(tmp_path / "out.svg").getroot().tag.endswith("svg")


SPECULATING = """{"format":"fairlead-schedule-1","page_size":4,"chunked_prefill_size":8}
{"step":0,"at":0.01,"seconds":0.01,"rows":[["r0",0,8,true]]}
{"step":1,"at":0.02,"seconds":0.01,"rows":[["r0",8,6,true]]}
{"step":2,"at":0.03,"seconds":0.01,"rows":[["r0",11,4,true],["r1",0,3,true]]}
{"step":3,"at":0.04,"seconds":0.01,"rows":[["r0",12,1,true],["r1",3,2,true]]}
{"step":4,"at":0.05,"seconds":0.01,"rows":[["r0",13,3,true]]}
{"step":5,"at":0.06,"seconds":0.01,"rows":[["r0",0,8,false]]}
{"step":6,"at":0.07,"seconds":0.01,"rows":[["r0",8,8,true]]}
{"step":7,"at":0.08,"seconds":0.01,"rows":[["r0",16,2,true]]}
"""


def test_schedule_distinguishes_a_speculative_decode_from_the_end_of_a_prompt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace"
    path.write_text(SPECULATING)
    assert _schedule(str(path), "--width", "40") == 0
    shown = capsys.readouterr().out
    lines = {words[0]: line for line in shown.splitlines() if (words := line.split())}
    assert lines["r0"] == "r0      █····▒█·", "after the preemption all known tokens are a prompt again"
    assert lines["r1"] == "r1        █·"
    assert "27 prefill tokens, 6 decodes, 2 of 8 draft tokens accepted" in shown
    assert _schedule(str(path), "--list") == 0
    listed = capsys.readouterr().out
    assert "decode r0+2/5\n" in listed and "prefill r1[0:3]*  decode r0+0/3\n" in listed
    assert "decode r0 r1+?/1\n" in listed, "r1 ended with this step: the trace does not say how many drafts were accepted"
    assert "decode r0+?/2\n" in listed, "preempted before it continued"
    assert _schedule(str(path), "--svg", str(tmp_path / "out.svg")) == 0
    drawn = (tmp_path / "out.svg").read_text()
    assert "r0[8:14], 2 of 5 draft tokens accepted" in drawn and "r1[3:5], 1 draft token" in drawn


def test_schedule_stops_when_its_reader_closes_the_pipe(tmp_path: Path) -> None:
    about, step = (
        {"format": "fairlead-schedule-1", "page_size": 4, "chunked_prefill_size": 8},
        {"at": 0.01, "seconds": 0.01, "rows": [["a", 0, 4, False]]},
    )
    trace = tmp_path / "trace"
    trace.write_text("\n".join(map(json.dumps, [about, *({"step": number, **step} for number in range(5000))])))
    command = [sys.executable, "-m", "fairlead", "schedule", str(trace), "--list"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None and process.stdout.readline()
        process.stdout.close()
        assert (process.stderr.read(), process.wait(30)) == ("", 128 + signal.SIGPIPE)


def test_schedule_refuses_a_file_that_is_no_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "other").write_text("{}\n")
    for arguments, says in (
        ((str(tmp_path / "none"),), "No such file"),
        ((str(tmp_path / "other"),), "not a schedule trace"),
        ((str(tmp_path),), "Is a directory"),
    ):
        assert _schedule(*arguments) == 2
        assert says in capsys.readouterr().err
