"""CPU time of the scheduler per step with 256 running and 2,000 waiting requests.

A step is plan() + advance(), with policy lpm. With steps launched ahead, as on GPUs, it is plan() + advance_unread() + reconcile()
beside the device's work.
"""

import random
from array import array
from statistics import median
from time import process_time

from msgspec.msgpack import Encoder

from bench.common.report import make_parser, write_report
from fairlead_index.hashing import extend
from fairlead_worker.cache.pages import PagePool
from fairlead_worker.cache.prefix import PrefixCache
from fairlead_worker.engine.request_timer import RequestTimer
from fairlead_worker.ipc.messages import Load, Sampling, Submit
from fairlead_worker.scheduler.config import SchedulerConfig
from fairlead_worker.scheduler.overlap_scheduler import OverlapScheduler
from fairlead_worker.scheduler.plan import StepPlan, StepResult
from fairlead_worker.scheduler.request import Request
from fairlead_worker.scheduler.scheduler import Scheduler
from fairlead_worker.scheduler.step_outputs import StepOutputs

TARGET_MICROSECONDS = 200


class Crowd:
    """A scheduler with a supply of requests."""

    def __init__(self, running: int, waiting: int) -> None:
        self._draw, self._waiting, self._submitted = random.Random(1), waiting, 0
        cache = PrefixCache(PagePool(80 * running, 16), 64, extend)
        self.scheduler = Scheduler(SchedulerConfig(max_model_len=8192, max_num_seqs=running, policy="lpm"), cache)
        self._stems = [self._draw.choices(range(30_000), k=256) for _ in range(20)]

    def refill(self) -> None:
        """Fill the queue up to the number of waiting requests."""
        draw = self._draw
        while len(self.scheduler.waiting) < self._waiting:
            prompt = draw.choice(self._stems)[: draw.choice([64, 128, 256])] + draw.choices(range(30_000), k=64)
            sampling = Sampling(max_tokens=draw.randrange(150, 400))
            self.scheduler.submit(Submit(str(self._submitted), array("I", prompt).tobytes(), sampling, 1))
            self._submitted += 1

    def result(self, rows: int) -> StepResult:
        return StepResult([[self._draw.randrange(30_000)] for _ in range(rows)], seconds=0.01)


def measure(running: int, waiting: int, steps: int) -> dict[str, dict[str, float]]:
    """Return the microseconds of plan, of advance and of both, over the steps in which all `running` requests run."""
    crowd = Crowd(running, waiting)
    scheduler = crowd.scheduler
    times: list[tuple[float, float]] = []
    for _ in range(steps):
        crowd.refill()
        start = process_time()
        plan = scheduler.plan()
        planned = process_time()
        result = crowd.result(plan.samples)
        back = process_time()
        scheduler.advance(plan, result)
        end = process_time()
        if plan.decodes >= 0.95 * running:
            times.append((planned - start, end - back))
        scheduler.cache.drain_events()
    table = {}
    for name, of in (("plan", lambda t: t[0]), ("advance", lambda t: t[1]), ("plan+advance", sum)):
        values = sorted(1e6 * of(each) for each in times)
        table[name] = {"p50": values[len(values) // 2], "p99": values[int(0.99 * len(values))], "max": values[-1]}
    return table


def measure_ahead(running: int, waiting: int, steps: int) -> dict[str, float]:
    """Return the median microseconds of plan, advance_unread, reconcile and all three, over the same steps."""
    crowd = Crowd(running, waiting)
    scheduler = OverlapScheduler(crowd.scheduler)
    times: list[tuple[float, float, float]] = []
    out: tuple[StepPlan, StepResult] | None = None

    def reconcile() -> float:
        """Reconcile the step in flight, if there is one. Return the CPU seconds."""
        nonlocal out
        start = process_time()
        if out is not None:
            (plan, result), out = out, None
            scheduler.reconcile(plan, lambda: result)
        return process_time() - start

    for _ in range(steps):
        crowd.refill()
        reconciled = 0.0 if scheduler.can_plan_ahead else reconcile()
        start = process_time()
        plan = scheduler.plan()
        planned = process_time() - start
        reconciled += reconcile()
        start = process_time()
        awaited = scheduler.rows_to_sample(plan)
        scheduler.advance_unread(plan, awaited)
        if plan.decodes >= 0.95 * running:
            times.append((planned, process_time() - start, reconciled))
        out = plan, crowd.result(len(awaited))
        crowd.scheduler.cache.drain_events()
    parts = {name: median(1e6 * each[place] for each in times) for place, name in enumerate(("plan", "advance_unread", "reconcile"))}
    return parts | {"all": median(1e6 * sum(each) for each in times)}


def report_cost(rows: int, steps: int = 500) -> dict[str, float]:
    """Return the median microseconds to build a `Step` and to encode it for ZeroMQ. All rows decode."""
    requests = [Request(Submit(f"cmpl-0123456789abcdef-{i}", b"", Sampling(max_tokens=9), 1), array("I", (1,)), 1, i) for i in range(rows)]
    outputs = StepOutputs(decoded=requests, tokens=[30_000 + i for i in range(rows)])
    plan, result = StepPlan([], decodes=rows, samples=rows), StepResult([], seconds=0.01)
    watch, encoder, load = RequestTimer(), Encoder(), Load(running=rows)
    times: dict[str, list[float]] = {"report": [], "encode": []}
    for _ in range(steps):
        start = process_time()
        step = watch.report(plan, result, outputs, (), load)
        made = process_time()
        encoder.encode(step)
        times["encode"].append(1e6 * (process_time() - made))
        times["report"].append(1e6 * (made - start))
    return {name: median(values) for name, values in times.items()}


def main() -> None:
    parser = make_parser(__name__, __doc__)
    parser.add_argument("--running", type=int, default=256)
    parser.add_argument("--waiting", type=int, default=2000)
    parser.add_argument("--steps", type=int, default=3000)
    options = parser.parse_args()
    table = measure(options.running, options.waiting, options.steps)
    print(f"{'microseconds':14} {'p50':>8} {'p99':>8} {'max':>8}")
    for name, row in table.items():
        print(f"{name:14} {row['p50']:8.0f} {row['p99']:8.0f} {row['max']:8.0f}")
    ahead = measure_ahead(options.running, options.waiting, options.steps)
    print("steps launched ahead: " + ", ".join(f"{name} {value:.0f}" for name, value in ahead.items()))
    beside = {f"{rows} rows": report_cost(rows) for rows in (8, 256)}
    for rows, costs in beside.items():
        print(f"beside plan and advance, {rows}: " + ", ".join(f"{name} {value:.1f}" for name, value in costs.items()))
    write_report(__name__, options, table | {"ahead": ahead, "beside": beside})
    middle = table["plan+advance"]["p50"]
    print(f"scheduler_step_us {middle:.0f} {TARGET_MICROSECONDS} {'ok' if middle <= TARGET_MICROSECONDS else 'short'}")
