"""Memory growth and leftover connections of one router under many streams for a long time."""

import threading
import time
from pathlib import Path

from bench.other_servers.process import Running
from bench.router.tools import Scenario, Tools, load
from fairlead_router.wire.connection_pool import IDLE_SECONDS

PACE_US, CHUNKS = 100_000, 50
SAMPLE_SECONDS = 1.0
SETTLE = 0.25
"""Share of the run before the slope is measured, because allocators and pools fill first."""


def watch(tools: Tools, router: Running, streams: int, seconds: float, cores: list[int], scratch: Path) -> dict[str, float]:
    """Run `streams` concurrent streams of 5 s. Return memory in bytes, its slope per minute, and the files that stay open."""
    print(f"== {streams} streams for {seconds:.0f} s", flush=True)
    samples: list[tuple[float, int]] = []
    over = threading.Event()

    def sample() -> None:
        while not over.is_set():
            samples.append((time.monotonic(), resident_bytes(router)))
            over.wait(SAMPLE_SECONDS)

    before, files = resident_bytes(router), open_files(router)
    sampler = threading.Thread(target=sample)
    sampler.start()
    try:
        seen = load(tools, router.port, Scenario("flat", streams, CHUNKS, PACE_US), cores, scratch, seconds, warm=0.0)
    finally:
        over.set()
        sampler.join()
    give_up = time.monotonic() + IDLE_SECONDS + 10  # the client's connections close now, idle ones to the worker after IDLE_SECONDS
    while open_files(router) > files + 2 and time.monotonic() < give_up:
        time.sleep(SAMPLE_SECONDS)
    settled = samples[int(len(samples) * SETTLE) :]
    figures = {
        "streams": float(streams),
        "seconds": seconds,
        "answers": float(seen["requests"]),
        "errors": float(seen["errors"]),
        "chunks_per_second": seen["chunks_per_second"],
        "way_p50": seen["way"].get("p50", 0.0),
        "way_p99": seen["way"].get("p99", 0.0),
        "before": float(before),
        "peak": float(max(size for _, size in samples)),
        "slope_a_minute": 60 * slope(settled),
        "open_before": float(files),
        "open_after": float(open_files(router)),
    }
    mib, a_minute = 2**20, figures["slope_a_minute"] / 2**10
    print(
        f"   {figures['answers']:.0f} streams ended, {figures['errors']:.0f} errors, {figures['chunks_per_second']:.0f} chunks/s;"
        f" memory {before / mib:.1f} MiB before, {figures['peak'] / mib:.1f} at most, slope {a_minute:.0f} KiB a minute;"
        f" open files {files} before, {figures['open_after']:.0f} after",
        flush=True,
    )
    return figures


def slope(samples: list[tuple[float, int]]) -> float:
    """Return the slope of the least-squares line in bytes per second."""
    if len(samples) < 2:
        return 0.0
    middle = sum(at for at, _ in samples) / len(samples)
    level = sum(size for _, size in samples) / len(samples)
    spread = sum((at - middle) ** 2 for at, _ in samples)
    return sum((at - middle) * (size - level) for at, size in samples) / spread


def resident_bytes(router: Running) -> int:
    total = 0
    for pid in router.processes():
        text = Path(f"/proc/{pid}/status").read_text()
        total += next((int(line.split()[1]) for line in text.splitlines() if line.startswith("VmRSS:")), 0)
    return 1024 * total


def open_files(router: Running) -> int:
    return sum(len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in router.processes())
