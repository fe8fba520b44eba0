"""Distinct functions and files of ours that one warm chat of one token runs, in router, API process and engine.

    python -m bench end_to_end/request_functions

`sys.setprofile` sees the calls in the main thread of each process, from just before the request to just after its answer. What runs there
besides (polling, load reports, the engine's loop) is in the window too, so the table has the fewest of `--rounds` requests. `--list` prints
the functions in the order of their first calls, each with its number of calls (a coroutine counts one more for each time it resumes).
The router runs `--policy LeastLoad` without Redis (`tests/api/fleet.py`): the default, PrefixAware with Redis, runs more functions, which
hash blocks, ask the index and score.
"""

import json
import os
import signal
import tempfile
import time
from pathlib import Path

import httpx
from tests.api.fleet import Pair

from bench.common.report import make_parser, write_report

COUNTER = """
import json, os, signal, sys
from pathlib import Path

calls = {}

def on_event(frame, event, argument):
    if event == "call" and "/fairlead_" in frame.f_code.co_filename:
        key = frame.f_code.co_filename.rpartition("/fairlead_")[2], frame.f_code.co_qualname
        calls[key] = calls.get(key, 0) + 1

def on_signal(number, frame):
    if sys.getprofile() is None:
        calls.clear()
        sys.setprofile(on_event)
        return
    sys.setprofile(None)
    target = Path(os.environ["BENCH_SEEN"]) / str(os.getpid())
    target.with_suffix(".new").write_text(json.dumps([[*key, count] for key, count in calls.items()]))
    target.with_suffix(".new").rename(target)

signal.signal(signal.SIGUSR2, on_signal)
"""
"""`sitecustomize` of the processes: the first SIGUSR2 starts to count, the next one writes what was called."""
CHAT = {"messages": [{"role": "user", "content": "Why is the sky blue? " * 40}], "max_tokens": 1, "temperature": 0, "stream": True}
PATIENCE_SECONDS = 30.0
SETTLE_SECONDS = 0.05


def count(folder: Path, pids: dict[str, int], client: httpx.Client) -> dict[str, dict[tuple[str, str], int]]:
    """Return the calls of each (file, function) that one request runs, by process, in the order of the first calls."""
    for pid in pids.values():
        (folder / str(pid)).unlink(missing_ok=True)
        os.kill(pid, signal.SIGUSR2)
    time.sleep(SETTLE_SECONDS)
    client.post("/v1/chat/completions", json=CHAT).raise_for_status()
    time.sleep(SETTLE_SECONDS)
    for pid in pids.values():
        os.kill(pid, signal.SIGUSR2)
    found, deadline = {}, time.monotonic() + PATIENCE_SECONDS
    for name, pid in pids.items():
        while not (folder / str(pid)).exists():
            assert time.monotonic() < deadline, f"{name} wrote nothing"
            time.sleep(0.01)
        found[name] = {(file, function): calls for file, function, calls in json.loads((folder / str(pid)).read_text())}
    return found


def main() -> None:
    parser = make_parser(__name__, __doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--list", action="store_true", help="print the functions")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "sitecustomize.py").write_text(COUNTER)
        os.environ["PYTHONPATH"] = f"{folder}:{os.environ.get('PYTHONPATH', '')}"
        os.environ["BENCH_SEEN"] = name
        with Pair(folder) as pair, httpx.Client(base_url=pair.urls[1], timeout=60) as client:
            for _ in range(5):
                client.post("/v1/chat/completions", json=CHAT).raise_for_status()
            pids = {"router": pair.router.pid, "API": pair.worker.process.pid, "engine": pair.worker.engine_pid}
            best = min((count(folder, pids, client) for _ in range(arguments.rounds)), key=lambda found: sum(map(len, found.values())))
    results = {
        name: {"functions": len(seen), "files": len({file for file, _ in seen}), "calls": sum(seen.values())} for name, seen in best.items()
    }
    every = {each for seen in best.values() for each in seen}
    calls = sum(each["calls"] for each in results.values())
    results["together"] = {"functions": len(every), "files": len({file for file, _ in every}), "calls": calls}
    for name, each in results.items():
        print(f"{name:10}{each['functions']:6} functions in {each['files']:4} files, {each['calls']:6} calls")
    if arguments.list:
        for process, seen in best.items():
            print("\n".join(f"{process:8}{calls:6}  {file} {function}" for (file, function), calls in seen.items()))
    write_report(__name__, arguments, results)


if __name__ == "__main__":
    main()
