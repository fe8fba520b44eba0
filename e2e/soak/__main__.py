"""Serve streams for some minutes with one fault a minute: `python -m e2e.soak --minutes 30`.

Prints each fault, then the failed requests and the memory of operator, routers and Redis. Exit code 1 if a request failed other than an
open stream of a killed worker, or if the service did not recover from a fault.
"""

import argparse
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

from e2e import progress
from e2e.cluster import Cluster
from e2e.cluster.cluster import LocalCluster
from e2e.service import Load, Service
from e2e.soak.faults import OF_CONTROL_PLANE, OF_OTHERS, REPLICAS, Fault, Faults, plan
from e2e.soak.memory import MemoryLog, slope
from e2e.system import PATIENCE, Images, System, eventually

MINUTE = 60.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m e2e.soak", description="One fault a minute under load, on a real Kubernetes.")
    parser.add_argument("--minutes", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1, help="of the order of the faults")
    parser.add_argument("--concurrency", type=int, default=4, help="streams at the same time")
    parser.add_argument("--json", type=Path, help="write the results to this file, too")
    options = parser.parse_args()
    with Cluster.acquire() as cluster:
        system = System(cluster, Images.build(cluster))
        system.prepare()
        try:
            system.install()
            result = soak(system, options)
        finally:
            system.remove()
    report(result)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if result["unexpected"] or any(fault["error"] for fault in result["faults"]) else 0


def soak(system: System, options: argparse.Namespace) -> dict[str, Any]:
    """Run all faults, and return the outcome of the load and the samples of memory."""
    service, chosen = Service(system, "soaked"), random.Random(options.seed)
    faults = Faults(service, chosen)
    kinds = OF_OTHERS + (OF_CONTROL_PLANE if isinstance(system.cluster, LocalCluster) else ())
    system.apply(faults.spec())
    service.wait_ready(replicas=REPLICAS, seconds=300)
    recoveries: list[dict[str, Any]] = []
    longest = (12 * MINUTE * options.minutes + 600) * PATIENCE  # as if every fault waited until its last timeout
    with MemoryLog(service) as memory, Load(service, options.concurrency, max_tokens=96, longest=longest) as load:
        for fault in plan(options.minutes, kinds, chosen):
            began = time.monotonic()
            error = apply_fault(fault, faults)
            seconds = time.monotonic() - began
            recoveries.append({"fault": fault.__name__, "seconds": round(seconds, 1), "error": error})
            progress.say(f"{fault.__name__}: " + (f"failed after {seconds:.0f} s: {error}" if error else f"ready after {seconds:.0f} s"))
            time.sleep(max(0.0, MINUTE - seconds))
    outcome = load.outcome
    unexpected = [failure for failure in outcome["failures"] if failure["pod"] not in faults.killed]
    return {
        "minutes": options.minutes,
        "requests": outcome["requests"],
        "failed": outcome["failed"],
        "unexpected": unexpected,
        "longest_gap": outcome["longest_gap"],
        "faults": recoveries,
        "memory": {name: describe(list(processes.values())) for name, processes in memory.samples.items()},
    }


def apply_fault(fault: Fault, faults: Faults) -> str:
    """Apply a fault, and wait until it has shown and the service is ready again. Returns what went wrong; empty: nothing."""
    try:
        has_shown = fault(faults)
        eventually(has_shown, 240, f"{fault.__name__} has shown")
        faults.service.wait_ready(replicas=REPLICAS)
    except Exception as error:  # the run goes on: the next faults and the load tell whether it matters
        return f"{type(error).__name__}: {error}"
    return ""


def describe(processes: list[list[tuple[float, float]]]) -> dict[str, Any]:
    """Return size and slope of the process of a component that was observed for longest."""
    samples = max(processes, key=lambda one: one[-1][0] - one[0][0])
    return {
        "processes": len(processes),
        "seconds": round(samples[-1][0] - samples[0][0]),
        "first_mb": round(samples[0][1], 1),
        "last_mb": round(samples[-1][1], 1),
        "mb_per_hour": slope(samples),
    }


def report(result: dict[str, Any]) -> None:
    expected = result["failed"] - len(result["unexpected"])
    print(f"{result['minutes']} minutes, {len(result['faults'])} faults, {result['requests']} requests")
    print(f"failed: {len(result['unexpected'])}, and {expected} streams of killed workers; longest gap {result['longest_gap']:.1f} s")
    print(f"{'process':<10} {'seconds':>8} {'first MB':>9} {'last MB':>9} {'MB/hour':>9}")
    for name, seen in result["memory"].items():
        slope_text = "too short" if seen["mb_per_hour"] is None else f"{seen['mb_per_hour']:.1f}"
        print(f"{name:<10} {seen['seconds']:>8} {seen['first_mb']:>9} {seen['last_mb']:>9} {slope_text:>9}")
    for fault in result["faults"]:
        if fault["error"]:
            print(f"not recovered: {fault['fault']} after {fault['seconds']:.0f} s: {fault['error']}")
    for failure in result["unexpected"]:
        print(f"failed: {failure}")


if __name__ == "__main__":
    sys.exit(main())
