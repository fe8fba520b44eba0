"""The engine model under the overlapped loop, with a device that works as late as possible, at once, or by random choice."""

import copy
from array import array
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace

from msgspec.structs import replace
from tests.worker.scheduler.engine_model import EngineModel

from fairlead_worker.cache.grouped_lease import PageTable
from fairlead_worker.engine.overlap import Overlap
from fairlead_worker.engine.request_timer import RequestTimer
from fairlead_worker.scheduler.overlap_scheduler import OverlapScheduler
from fairlead_worker.scheduler.plan import Row, StepPlan, StepResult
from fairlead_worker.scheduler.request import Request
from fairlead_worker.scheduler.step_outputs import StepOutputs


class Device:
    """Work in order. It is done when `catch_up` says so, at the latest when a caller waits for a result."""

    def __init__(self) -> None:
        self.queue: deque[Callable[[], None]] = deque()

    def catch_up(self, most: int = 1 << 30) -> None:
        while self.queue and most:
            self.queue.popleft()()
            most -= 1


class OverlappedModel(EngineModel):
    """`step` is a round of the overlapped loop."""

    def __init__(self, pages: int, page_size: int, **config: object) -> None:
        super().__init__(pages, page_size, **config)  # type: ignore[arg-type]  # test keywords
        self.ahead = OverlapScheduler(self.scheduler)
        self.device = Device()
        self.overlap = Overlap(self.ahead, self, RequestTimer(), self._reconciled)
        self.unread: LaunchedModel | None = None
        self.stalls: Callable[[], bool] = lambda: False
        """Whether a row gets no token, as when the mask of its grammar is late."""
        self.ends: Callable[[], bool] = lambda: False
        """Whether that is the end of its request, as when its grammar leaves nothing to choose."""
        self.between: Callable[[], None] = lambda: None
        """Between two rounds: how far the device gets."""
        self.launched = self.discarded = self.stalled = 0

    def _reconciled(self, plan: StepPlan, result: StepResult, outputs: StepOutputs) -> None:
        for output in outputs:
            self._tell(output)

    def step(self, abort_in_flight: str | None = None) -> StepPlan:
        self.overlap.step()
        self.between()
        if abort_in_flight is not None:
            self.abort(abort_in_flight)
        return StepPlan([Row(None, 0, 0, array("i"), False)]) if self.overlap.is_busy else StepPlan()  # type: ignore[arg-type]  # truth alone

    def check(self) -> None:
        """The invariants are those of a scheduler with nothing out."""

    def rest(self) -> None:
        self.overlap.reconcile()
        super().check()

    def can_launch(self, plan: StepPlan) -> bool:
        return not (plan.scores or plan.pools or plan.drafted)

    def execute(self, plan: StepPlan) -> StepResult:
        self.device.catch_up()
        return self._forward(plan)

    def launch(self, plan: StepPlan) -> "LaunchedModel":
        self.launched += 1
        self.plans.append([(row.request.id, row.start, row.count) for row in plan.rows])
        return LaunchedModel(self, plan)


class LaunchedModel:
    """Implements `engine.overlap.Launched`."""

    def __init__(self, machine: OverlappedModel, plan: StepPlan) -> None:
        self.machine, self.plan = machine, plan
        self.wanted: list[Request] = []
        self.chosen: dict[Request, int] = {}
        self.chose = False
        self.sampled = [row.request for row in plan.rows if row.samples]
        self.pending = machine.take_pending()
        self.copied = replace(plan, rows=[self._copy(row) for row in plan.rows])  # what `pack` would copy: the host is not looked at later
        self.before = machine.unread
        self.fills = [
            (row.request, copied.request)
            for row, copied in zip(plan.rows, self.copied.rows, strict=True)
            if self.before is not None and row.request in self.before.wanted and row.end > len(row.request.tokens)
        ]
        awaited = {copied for _, copied in self.fills}
        for row in self.copied.rows:
            assert row.request.unread == (row.request in awaited), "each unread token belongs to an awaited step"
        machine.device.queue.append(self._run)

    @staticmethod
    def _copy(row: Row) -> Row:
        request = copy.copy(row.request)
        request.tokens, request.lease = array("I", [*request.tokens, *[0] * request.unread]), SimpleNamespace(shared=request.lease.shared)  # type: ignore[assignment,union-attr]
        pages = array("i", row.pages)
        if isinstance(row.pages, PageTable):
            pages = PageTable("i", row.pages)
            pages.others = [array("i", table) for table in row.pages.others]
        return Row(request, row.start, row.count, pages, row.samples, state=row.state)

    def _run(self) -> None:
        for request, copied in self.fills:
            assert self.before is not None and self.before.chose
            copied.tokens[-1] = self.before.chosen[request]
        self.results = self.machine._forward(self.copied, self.pending).tokens

    def choose(self, rows: list[Row]) -> None:
        assert not any(row.request.finish for row in rows)
        self.wanted = [row.request for row in rows]
        self.machine.discarded += len(self.sampled) - len(self.wanted)
        self.machine.unread = self
        self.machine.device.queue.append(self._choose)

    def _choose(self) -> None:
        found = dict(zip(self.sampled, self.results, strict=True))
        self.chosen, self.chose = {request: found[request][0] for request in self.wanted}, True

    def read(self) -> StepResult:
        machine = self.machine
        while not self.chose:
            machine.device.catch_up(1)
        machine.unread = None
        tokens = [[] if machine.stalls() else [self.chosen[request]] for request in self.wanted]
        machine.stalled += tokens.count([])
        late = [request.id for request, of in zip(self.wanted, tokens, strict=True) if not of]
        endings = {name: "nothing can be chosen" for name in late if machine.ends()}
        return StepResult(tokens, seconds=machine.seconds(self.plan), endings=endings)
