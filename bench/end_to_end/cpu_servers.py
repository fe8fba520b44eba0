"""Latency, throughput, start and memory of Fairlead's worker, vLLM, transformers and llama.cpp on CPU.

All servers get the same load from the same client. They are measured in turns, and each is started again for every repeat.
"""

import os
import signal
import sys
import tempfile
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.common.report import make_parser, write_report
from bench.other_servers import model as bench_model
from bench.other_servers.answers import QUESTION, check_answer
from bench.other_servers.environments import Environment, NotMade, make
from bench.other_servers.load import DATA, LoadFailed, Measured, measure
from bench.other_servers.process import NotServing, Running, free_port
from bench.other_servers.ratios import Kept, figure, kept
from bench.other_servers.servers import SERVERS, Server, Setting

CACHE = Path.home() / ".cache" / "fairlead" / "peers"


def main() -> int:
    parser = make_parser(__name__, __doc__)
    parser.add_argument("--model", choices=bench_model.TRAINED, default="smollm2")
    parser.add_argument("--servers", default=",".join(SERVERS), help="comma-separated (default: all)")
    parser.add_argument("--data", default="random,prefix", help=f"comma-separated, of {', '.join(DATA)} (one stream)")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cache", type=Path, default=CACHE, help="where environments are kept")
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(2)), help="of the first repeat's prompts")
    options = parser.parse_args()
    names, data = options.servers.split(","), options.data.split(",")
    for given, known in ((names, SERVERS), (data, DATA)):
        if unknown := [name for name in given if name not in known]:
            parser.error(f"{', '.join(unknown)}: not known; choose from {', '.join(known)}")
    signal.signal(signal.SIGTERM, end)
    try:
        model = bench_model.make(options.model)
    except NotMade as error:
        print(f"bench: end_to_end/cpu_servers: {error}", file=sys.stderr)
        return 1
    settings, client, missing = prepare(names, options.cache, model)
    if client is None:
        reason = missing.get("vllm") or missing.get("client")
        print(f"bench: end_to_end/cpu_servers: vLLM's benchmark client is missing: {reason}", file=sys.stderr)
        return 1
    runs: dict[tuple[str, str], list[Measured]] = defaultdict(list)
    with tempfile.TemporaryDirectory(prefix="fairlead-peers-") as scratch:
        for repeat in range(options.repeats):
            for name, setting in settings.items():
                try:
                    one_life(SERVERS[name], setting, client, data, options.seed + repeat, Path(scratch), runs)
                except (NotServing, LoadFailed, OSError) as error:
                    missing[name] = str(error)
                    print(f"   {name} failed: {error}", flush=True)
    promises = kept(runs)
    report(runs, promises, missing)
    write_report(__name__, options, {"model": model.name, **as_document(runs, promises, missing)})
    return 0


def end(*_: object) -> None:
    """Unwind, so that no server is left running. timeout(1) sends two signals, and the second would interrupt that."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(143)


def prepare(names: list[str], cache: Path, model: bench_model.Model) -> tuple[dict[str, Setting], Environment | None, dict[str, str]]:
    """Return each server's environment, the client's environment, and the reason of each missing one."""
    cores = tuple(sorted(os.sched_getaffinity(0)))
    print(f"== {len(cores)} cores; model {model.name} in {model.folder}, environments in {cache}", flush=True)
    made: dict[str, Environment] = {}
    missing: dict[str, str] = {}
    for needed in dict.fromkeys(["vllm", *(SERVERS[name].environment or "" for name in names)]):
        try:
            made[needed] = make(needed, cache) if needed else Environment(Path(sys.executable).parent.parent)
        except NotMade as error:
            missing |= {server.name: str(error) for server in SERVERS.values() if server.environment == needed} | {needed: str(error)}
            print(f"   no environment for {needed}: {error}", flush=True)
    settings = {}
    for name in names:
        if (environment := made.get(SERVERS[name].environment or "")) is not None:
            setting = Setting(environment, model, environment.folder if SERVERS[name].environment else cache, 0, cores)
            try:
                SERVERS[name].prepare(setting)
                settings[name] = setting
            except NotMade as error:
                missing[name] = str(error)
                print(f"   {name}: {error}", flush=True)
    return settings, made.get("vllm"), missing


def one_life(
    server: Server,
    setting: Setting,
    client: Environment,
    data: list[str],
    seed: int,
    scratch: Path,
    runs: dict[tuple[str, str], list[Measured]],
) -> None:
    """Start the server, send it each kind of load, and end it. Raises NotServing, LoadFailed."""
    port = free_port()
    command = server.command(replace(setting, port=port))
    with Running(command, port, scratch / f"{server.name}.log") as running:
        startup = running.wait_ready()
        print(f"   {server.name}: {QUESTION} {check_answer(running, setting.model)!r}", flush=True)
        for kind in data:
            seen = measure(running, client, setting.model.folder, kind, seed=seed, startup=startup, scratch=scratch)
            runs[server.name, kind].append(seen)
            print(row(server.name, kind, [seen]), flush=True)


def row(name: str, kind: str, runs: list[Measured]) -> str:
    """Return one line of the table: medians, and the range of the throughput if there are several runs."""
    middle = {field: figure(runs, field) for field in runs[0].as_dict()}
    rates = [run.tokens_per_second for run in runs]
    spread = f"({min(rates):.0f}-{max(rates):.0f})" if len(rates) > 1 else ""
    notes = [f"{count} {what}" for what in ("failed", "empty") if (count := sum(getattr(run, what) for run in runs))]
    return (
        f"{name:14} {kind:7} {middle['ttft_p50']:7.0f} {middle['ttft_p99']:7.0f} {middle['itl_p50']:7.1f} {middle['itl_p99']:7.1f} "
        f"{middle['tokens_per_second']:7.0f} {spread:10} {middle['startup']:7.1f} {middle['pss'] / 2**30:6.2f} {middle['others']:6.2f}  "
        f"{', '.join(notes)}"
    )


HEADER = (
    f"{'server':14} {'data':7} {'TTFT50':>7} {'TTFT99':>7} {'ITL50':>7} {'ITL99':>7} {'tok/s':>7} {'range':10} {'startup':>7} "
    f"{'PSS':>6} {'others':>6}"
)


def report(runs: dict[tuple[str, str], list[Measured]], promises: list[Kept], missing: dict[str, str]) -> None:
    print("\nmedians; milliseconds, output tokens a second, seconds to the first completion, GiB, cores used by others\n")
    print(HEADER)
    for (name, kind), measured in sorted(runs.items(), key=lambda item: (item[0][1], list(SERVERS).index(item[0][0]))):
        print(row(name, kind, measured))
    print()
    for promise in promises:
        print(promise)
    for name, reason in missing.items():
        print(f"not measured, or not each time: {name}: {reason}")


def as_document(runs: dict[tuple[str, str], list[Measured]], promises: list[Kept], missing: dict[str, str]) -> dict[str, Any]:
    """Return the figures for the JSON report."""
    return {
        "runs": [{"server": name, "data": kind, **run.as_dict()} for (name, kind), measured in runs.items() for run in measured],
        "ratios": [
            {"figure": k.promise.figure, "peer": k.promise.peer, "data": k.data, "ratio": k.ratio, "bound": k.promise.bound, "ok": k.ok}
            for k in promises
        ],
        "missing": missing,
    }
