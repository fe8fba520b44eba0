"""For each alert: series at which it fires, and near misses at which it must not."""

from dataclasses import dataclass, field

from .series import CONDITIONS, LOST, MINUTES, OPERATOR, RESET, STEP, Fleet, counter, gauge, operator, sawtooth, steps_at

CHAT = Fleet()
SERVICE = CHAT.labels
ERRORS = operator("reconcile_errors_total", error="ApiError")


@dataclass(frozen=True)
class Fires:
    """The alert is silent before minute `at` and fires at it. `also`: other alerts that fire then, for the same labels."""

    title: str
    series: dict[str, str]
    at: float
    labels: dict[str, str] = field(default_factory=lambda: dict(SERVICE))
    also: tuple[str, ...] = ()
    value: str = ""
    resolved: float | None = None  # minute


@dataclass(frozen=True)
class Silent:
    """A near miss: the alert never fires. Others may."""

    title: str
    series: dict[str, str]


def conditions(minutes: float = MINUTES, after: dict[str, int] | None = None, pod: str = "op-a", **values: int) -> dict[str, str]:
    """Conditions that differ from a healthy service's from minute 5, for `minutes`; then `after`."""
    later = {**CONDITIONS, **(after or {})}
    made = {**CONDITIONS, **values}
    return {CHAT.condition(type, pod): gauge((CONDITIONS[type], 5), (made[type], minutes), (later[type], MINUTES)) for type in CONDITIONS}


def failover(**values: int) -> dict[str, str]:
    """The fault begins at minute 5. The leader is lost at minute 12, and its successor reports the service a minute later."""
    made = {}
    for type, healthy in CONDITIONS.items():
        value = values.get(type, healthy)
        made[CHAT.condition(type)] = gauge((healthy, 5), (value, 7), (LOST, MINUTES))
        made[CHAT.condition(type, "op-b")] = gauge((LOST, 13), (value, MINUTES))
    made[CHAT.workers()] = gauge((2, 12), (LOST, MINUTES))
    made[CHAT.workers("op-b")] = gauge((LOST, 13), (2, MINUTES))
    made[operator("leading")] = gauge((1, 12), (LOST, MINUTES))
    made[operator("leading", "op-b")] = gauge((0, 12.5), (1, MINUTES))
    return made


def recovered(end: float, **values: int) -> dict[str, str]:
    """The fault begins at minute 5. The leader is lost at minute `end`, and its successor reports a healthy service half a minute later."""
    made = {CHAT.workers("op-b"): gauge((LOST, end + STEP), (2, MINUTES))}
    for type, healthy in CONDITIONS.items():
        made[CHAT.condition(type)] = gauge((healthy, 5), (values.get(type, healthy), end - 5), (LOST, MINUTES))
        made[CHAT.condition(type, "op-b")] = gauge((LOST, end + STEP), (healthy, MINUTES))
    return made


def pulse(series: str, fault: float, minutes: float, good: float) -> dict[str, str]:
    return {series: gauge((good, 5), (fault, minutes), (good, MINUTES))}


def gone(series: str) -> dict[str, str]:
    """The series ends at minute 5 with its pod."""
    return {series: gauge((0, 5), (LOST, MINUTES))}


def errors(rate: float, minutes: float = MINUTES) -> dict[str, str]:
    """Reconcile errors a minute from minute 5."""
    return {ERRORS: counter((0, 5), (rate, minutes), (0, MINUTES))}


EXPIRY = CHAT.router("certificate_expiry_timestamp_seconds")
HELD, UP, KEYS = CHAT.router("held_requests"), CHAT.router("index_up"), CHAT.router("key_file_ok")
BROKEN, FULL, QUEUED = CHAT.router("broken_streams_total"), CHAT.worker("index_full"), CHAT.router("queued_requests", "r-2")
TASK = CHAT.router("task_failures_total", task="key file")
TASK_LABELS = {**SERVICE, "task": "key file"}
ROUTERS = ("r-1", "r-2")
PREDICTIONS = CHAT.router("prediction_error_tokens_count")
PREDICTED = {CHAT.router("prediction_error_tokens_count", pod): counter((60, 4), (0, MINUTES)) for pod in ROUTERS}
NOT_READY = {"Ready": 0, "Available": 0}
RESYNC = operator("seconds_since_resync")
UPDATES_FAILED = operator("image_update_services", phase="Failed")


def refused(reason: str, rate: float, minutes: float = MINUTES, pod: str = "r-1") -> dict[str, str]:
    return {CHAT.router("refused_total", pod, reason=reason): counter((0, 5), (rate, minutes), (0, MINUTES))}


CASES: dict[str, tuple[Fires | Silent, ...]] = {
    "FairleadServiceNotReady": (
        Fires("no worker is ready", conditions(**NOT_READY), 20),
        Fires("a rollout without a worker that serves", conditions(**NOT_READY, Progressing=1), 20),
        Fires("a rollout with a fault", conditions(Ready=0, Progressing=1, Degraded=1), 20, also=("FairleadServiceDegraded",)),
        Fires("pods are ready and completions fail", conditions(Ready=0), 20),
        Fires("the leader is replaced meanwhile", failover(**NOT_READY), 20),
        Fires("Ready again after 20 minutes", conditions(20, **NOT_READY), 20, resolved=25),
        Silent("14 minutes", conditions(14, **NOT_READY)),
        Silent("13 minutes, and the next leader finds it Ready", recovered(18, **NOT_READY)),
        Silent(
            "11 minutes, then it is deleted", {**conditions(**NOT_READY), CHAT.condition("Ready"): gauge((1, 5), (0, 11), (LOST, MINUTES))}
        ),
        Silent("a rollout beside workers that serve", conditions(Progressing=1)),
        Silent("capacity below the floor", conditions(Available=0, Degraded=1)),
        Silent("asleep for an hour", {CHAT.workers(): gauge((0, MINUTES))}),
        Fires(
            "asleep, and no router is left to wake it",
            {**conditions(Ready=0, Degraded=1), CHAT.workers(): gauge((0, MINUTES))},
            20,
            also=("FairleadServiceDegraded",),
        ),
        Silent("no worker is wanted", {**conditions(**NOT_READY), CHAT.workers(): gauge((0, MINUTES))}),
        Silent("a fault that Ready does not show", conditions(Degraded=1)),
        Silent("the operator is gone", {CHAT.condition(type): gauge((CONDITIONS[type], 5), (LOST, MINUTES)) for type in CONDITIONS}),
    ),
    "FairleadServiceDegraded": (
        Fires("a fault", conditions(Degraded=1), 15),
        Fires("the leader is replaced meanwhile", failover(Degraded=1), 15),
        Silent("9 minutes", conditions(9, Degraded=1)),
        Silent("8 minutes, and the next leader finds no fault", recovered(13, Degraded=1)),
        Silent("not Ready without a fault", conditions(Ready=0, Progressing=1)),
        Silent("the service is deleted after 5 minutes", {CHAT.condition("Degraded"): gauge((0, 5), (1, 5), (LOST, MINUTES))}),
    ),
    "FairleadRequestsHeld": (
        Fires("one router holds a request", pulse(HELD, 1, MINUTES, 0), 10),
        Silent("4 minutes", pulse(HELD, 9, 4, 0)),
        Silent("requests are queued, and workers answer", {QUEUED: gauge((9, MINUTES))}),
        Silent("the router is gone", gone(HELD)),
    ),
    "FairleadBrokenStreams": (
        Fires("one each four minutes", {BROKEN: steps_at(*range(5, MINUTES, 4))}, 15),
        Silent("a single one", {BROKEN: steps_at(5)}),
        Silent("one a quarter of an hour", {BROKEN: steps_at(5, 20, 35, 50)}),
        Silent("requests fail before they begin", {CHAT.requests("502"): counter((0, 5), (60, MINUTES))}),
        Silent("the router restarts", {BROKEN: counter((0, 20), (RESET, 0), (0, MINUTES))}),
    ),
    "FairleadRequestsRefused": (
        *(Fires(f"reason {reason}", refused(reason, 12), 18) for reason in ("queue", "queue_timeout", "slo", "cached_first", "hold")),
        Fires("8 a minute by two routers", {**refused("queue", 4), **refused("queue", 4, pod="r-2")}, 19),
        *(Silent(f"clients cause it: {reason}", refused(reason, 60)) for reason in ("key", "quota")),
        Silent("4 a minute", refused("queue", 4)),
        Silent("4 minutes", refused("queue", 60, 4)),
        Silent("the series is lost", {CHAT.router("refused_total", reason="queue"): counter((60, 5), (LOST, MINUTES))}),
    ),
    "FairleadSlowFirstToken": (
        Fires("prefill is slow", CHAT.first_tokens((5, 60, 0), (MINUTES, 30, 30)), 20.5, value="19s"),
        Fires("requests wait in a router's queue", {**CHAT.first_bytes(30, 30), QUEUED: gauge((0, 5), (3, MINUTES))}, 24.5, value="28s"),
        Silent("long answers that are not streamed", CHAT.first_bytes(10, 50)),
        Silent("long answers that are not streamed, and a queue now and then", {**CHAT.first_bytes(10, 50), QUEUED: sawtooth(4)}),
        Silent("10 minutes", CHAT.first_tokens((5, 60, 0), (10, 30, 30), (MINUTES, 60, 0))),
        Silent("one in fifty is slow", CHAT.first_tokens((MINUTES, 49, 1))),
        Silent("few requests are all slow at one worker, many fast at the other", CHAT.first_tokens((MINUTES, 0, 1), pod="w-2")),
        Silent(
            "below ten seconds, beside a queue",
            {
                **CHAT.first_tokens((MINUTES, 30, 30), slower_than="1"),
                **CHAT.first_bytes(30, 30, slower_than="1"),
                QUEUED: gauge((3, MINUTES)),
            },
        ),
        Silent("no requests", {**CHAT.first_bytes(0, 0), **CHAT.first_tokens((MINUTES, 0, 0))}),
    ),
    "FairleadIndexUnavailable": (
        Fires("one router cannot read it", pulse(UP, 0, MINUTES, 1), 10),
        Silent("4 minutes", pulse(UP, 0, 4, 1)),
        Silent("Redis is full", pulse(FULL, 1, MINUTES, 0)),
        Silent("the router is gone", {UP: gauge((1, 5), (LOST, MINUTES))}),
    ),
    "FairleadIndexFull": (
        Fires("a worker cannot write", pulse(FULL, 1, MINUTES, 0), 10),
        Silent("4 minutes", pulse(FULL, 1, 4, 0)),
        Silent("Redis is away", pulse(UP, 0, MINUTES, 1)),
        Silent("the worker is gone", gone(FULL)),
    ),
    "FairleadPredictionsWrong": (
        Fires("one worker", pulse(CHAT.error_ratio(), 0.8, MINUTES, 0.1), 35, {**SERVICE, "worker": "w-1"}),
        Fires(
            "one router has a prediction each five minutes",
            {**pulse(CHAT.error_ratio(), 0.8, MINUTES, 0.1), **PREDICTED, PREDICTIONS: counter((0.2, MINUTES))},
            35,
            {**SERVICE, "worker": "w-1"},
        ),
        Silent("wrong by less than half a prompt", pulse(CHAT.error_ratio(), 0.4, MINUTES, 0.1)),
        Silent("25 minutes", pulse(CHAT.error_ratio(), 0.8, 25, 0.1)),
        Silent(
            "one worker after the other",
            {
                CHAT.error_ratio("w-1"): gauge((0.1, 5), (0.8, 20), (0.1, MINUTES)),
                CHAT.error_ratio("w-2"): gauge((0.1, 25), (0.8, 20), (0.1, MINUTES)),
            },
        ),
        Silent("the last prediction was wrong", {**pulse(CHAT.error_ratio(), 1, MINUTES, 0.1), **PREDICTED}),
        Silent("the index is away", pulse(UP, 0, MINUTES, 1)),
    ),
    "FairleadKeyFileBroken": (
        Fires("one router cannot read it", pulse(KEYS, 0, MINUTES, 1), 10),
        Silent("4 minutes", pulse(KEYS, 0, 4, 1)),
        Silent("clients use unknown keys", refused("key", 60)),
        Silent("the router is gone", {KEYS: gauge((1, 5), (LOST, MINUTES))}),
    ),
    "FairleadCertificateExpires": (
        Fires("a week is left at minute 10", {EXPIRY: gauge((7 * 86400 + 599, MINUTES))}, 20),
        Silent("a week and an hour", {EXPIRY: gauge((7 * 86400 + 3900, MINUTES))}),
        Silent("plain HTTP", {EXPIRY: gauge((0, MINUTES))}),
        Silent("it is renewed", {EXPIRY: gauge((7 * 86400 + 599, 15), (90 * 86400, MINUTES))}),
    ),
    "FairleadRouterTaskFails": (
        Fires("it fails twice a minute", {TASK: counter((0, 5), (2, MINUTES))}, 11.5, TASK_LABELS),
        Silent("it failed twice", {TASK: steps_at(5, 6)}),
        Silent("once each ten minutes", {TASK: steps_at(5, 15, 25, 35, 45, 55)}),
        Silent("three tasks fail once", {CHAT.router("task_failures_total", task=task): steps_at(5) for task in ("a", "b", "c")}),
        Silent("the router restarts", {TASK: counter((0, 20), (RESET, 0), (0, MINUTES))}),
    ),
    "FairleadNoLeader": (
        Fires("two standbys", pulse(operator("leading"), 0, MINUTES, 1), 10, {"namespace": OPERATOR}),
        Fires(
            "no operator",
            {operator("leading", pod): gauge((pod == "op-a", 5), (LOST, MINUTES)) for pod in ("op-a", "op-b")},
            10,
            {"namespace": OPERATOR},
        ),
        Fires(
            "no operator, beside another release's",
            {
                **{operator("leading", pod): gauge((pod == "op-a", 5), (LOST, MINUTES)) for pod in ("op-a", "op-b")},
                operator("leading", "op-c", "fairlead-test"): gauge((1, MINUTES)),
            },
            10,
            {"namespace": OPERATOR},
        ),
        Silent("4 minutes", pulse(operator("leading"), 0, 4, 1)),
        Silent("a standby takes over", failover()),
        Silent("the standby is gone", {operator("leading", "op-b"): gauge((0, 5), (LOST, MINUTES))}),
        Silent("reconciles fail", errors(60)),
    ),
    "FairleadImageRolloutStopped": (
        Fires("an update failed", pulse(UPDATES_FAILED, 1, MINUTES, 0), 10, {"namespace": OPERATOR}),
        Fires(
            "it goes back for long",
            pulse(operator("image_update_services", phase="RollingBack"), 1, MINUTES, 0),
            10,
            {"namespace": OPERATOR},
        ),
        Silent("other images continue it after 4 minutes", pulse(UPDATES_FAILED, 1, 4, 0)),
        Silent("services wait for their wave", pulse(operator("image_update_services", phase="Waiting"), 150, MINUTES, 0)),
        Silent("a service is Degraded", conditions(Degraded=1)),
    ),
    "FairleadReconcileErrors": (
        Fires("one service fails with each retry", errors(0.9), 26, {"namespace": OPERATOR, "error": "ApiError"}),
        Fires("many services fail", errors(60), 20.5, {"namespace": OPERATOR, "error": "ApiError"}),
        Fires(
            "the leader is replaced meanwhile",
            {
                ERRORS: counter((0, 5), (1.2, 15), (LOST, MINUTES)),
                operator("reconcile_errors_total", "op-b", error="ApiError"): counter((LOST, 20), (1.2, MINUTES)),
            },
            24.5,
            {"namespace": OPERATOR, "error": "ApiError"},
        ),
        Silent("the API server is away for 3 minutes", errors(200, 3)),
        Silent("one each three minutes", errors(0.33)),
        Silent("the operator restarts", {ERRORS: counter((0.3, 20), (RESET, 0), (0.3, MINUTES))}),
    ),
    "FairleadResyncLate": (
        # Liveness fails from 900 s, for three probes of 20 s.
        Fires("listings fail until the kubelet restarts the operator", {RESYNC: sawtooth(16)}, 12.5, {"namespace": OPERATOR}),
        Silent("one listing fails", {RESYNC: sawtooth(10)}),
        Silent("the operator restarts", {RESYNC: sawtooth(3)}),
        Silent("the operator is gone", {RESYNC: gauge((700, 1), (LOST, MINUTES))}),
        Silent("reconciles fail", errors(60)),
    ),
}
