"""Generated series in promtool's notation: a healthy fleet, and the changes that a fault makes to it."""

from collections.abc import Iterable

STEP = 0.5  # minutes between two scrapes
MINUTES = 60
COUNT = int(MINUTES / STEP)
LOST = None  # as a value: the target is gone
RESET = "reset"  # as a rate: the counter restarts at 0


def gauge(*steps: tuple[float | None, float]) -> str:
    """Return the samples of a gauge that has each value for these minutes; the last value stays."""
    samples = [value for value, minutes in steps for _ in range(int(minutes / STEP))]
    samples += [steps[-1][0]] * (COUNT - len(samples))
    return _notation(samples[:COUNT])


def counter(*steps: tuple[float | str | None, float]) -> str:
    """Return the samples of a counter that grows by so much a minute for these minutes; the last rate stays."""
    samples: list[float | None] = []
    value = 0.0
    for number, (rate, minutes) in enumerate(steps):
        if rate == RESET:
            value = 0.0
            continue
        count = COUNT - len(samples) if number == len(steps) - 1 else int(minutes / STEP)
        for _ in range(count):
            samples.append(None if rate is LOST else value)
            value += float(rate or 0) * STEP
    return _notation(samples[:COUNT])


def steps_at(*minutes: float) -> str:
    """Return the samples of a counter that grows by 1 at each of these minutes."""
    return _notation([float(sum(minute <= index * STEP for minute in minutes)) for index in range(COUNT)])


def sawtooth(period: float) -> str:
    """Return the samples of a gauge that grows by 60 a minute, and begins again at 0 after `period` minutes."""
    return _notation([index * STEP % period * 60 for index in range(COUNT)])


def _notation(samples: Iterable[float | None]) -> str:
    words, lost = [], False
    for value in samples:
        words.append(f"{value:g}" if value is not None else "_" if lost else "stale")
        lost = value is None
    return " ".join(words)


def name(family: str, **labels: str) -> str:
    return family + "{" + ",".join(f'{key}="{value}"' for key, value in labels.items()) + "}"


class Fleet:
    """Names of the series of one service, and those of the operator."""

    def __init__(self, service: str = "chat", namespace: str = "ml") -> None:
        self.labels = {"namespace": namespace, "service": service}

    def condition(self, type: str, operator: str = "op-a") -> str:
        return name("fairlead_service_condition", **self.labels, type=type, pod=operator)

    def workers(self, operator: str = "op-a") -> str:
        return name("fairlead_service_workers", **self.labels, state="desired", pod=operator)

    def router(self, family: str, pod: str = "r-1", **labels: str) -> str:
        return name(f"fairlead_router_{family}", **self.labels, pod=pod, component="router", **labels)

    def requests(self, code: str, pod: str = "r-1") -> str:
        return self.router("requests_total", pod, path="/v1/chat/completions", code=code)

    def error_ratio(self, worker: str = "w-1", pod: str = "r-1") -> str:
        return self.router("worker_prediction_error_ratio", pod, worker=worker, direction="over")

    def worker(self, family: str, pod: str = "w-1", **labels: str) -> str:
        return name(f"fairlead_{family}", **self.labels, pod=pod, component="worker", **labels)

    def first_bytes(self, fast: float, slow: float, slower_than: str = "10") -> dict[str, str]:
        """Routers' times: so many a minute below 1 s, and between 10 and 30 s (`slower_than="1"`: between 1 and 10 s)."""
        rates = {"1": fast, "10": fast if slower_than == "10" else fast + slow, "30": fast + slow, "+Inf": fast + slow}
        return {self.router("ttfb_seconds_bucket", le=le): counter((rate, MINUTES)) for le, rate in rates.items()}

    def first_tokens(self, *phases: tuple[float, float, float], pod: str = "w-1", slower_than: str = "10") -> dict[str, str]:
        """Workers' times: (minutes, so many a minute below 1 s, so many between 10 and 20 s; `slower_than="1"`: between 1 and 10 s)."""
        made = {}
        for le in ("1", "10", "20", "+Inf"):
            steps = [(fast if float(le) <= float(slower_than) else fast + slow, minutes) for minutes, fast, slow in phases]
            made[self.worker("time_to_first_token_seconds_bucket", pod, le=le)] = counter(*steps)
        return made

    def healthy(self) -> dict[str, str]:
        """Series of a service with two routers that answers 120 requests a minute, and whose clients exceed their quota."""
        made = {self.condition(type): gauge((value, MINUTES)) for type, value in CONDITIONS.items()}
        made[self.workers()] = gauge((2, MINUTES))
        for pod in ("r-1", "r-2"):
            made[self.requests("200", pod)] = counter((60, MINUTES))
            made[self.requests("503", pod)] = counter((0.6, MINUTES))
            made[self.router("refused_total", pod, reason="quota")] = counter((60, MINUTES))
            made[self.router("prediction_error_tokens_count", pod)] = counter((60, MINUTES))
            for family in ("held_requests", "queued_requests"):
                made[self.router(family, pod)] = gauge((0, MINUTES))
            for family in ("index_up", "key_file_ok"):
                made[self.router(family, pod)] = gauge((1, MINUTES))
            made[self.router("broken_streams_total", pod)] = counter((0, MINUTES))
            made[self.error_ratio(pod=pod)] = gauge((0.1, MINUTES))
            made[self.router("task_failures_total", pod, task="key file")] = counter((0, MINUTES))
        made |= {self.worker("index_full", pod): gauge((0, MINUTES)) for pod in ("w-1", "w-2")}
        return made | self.first_bytes(60, 0) | self.first_tokens((MINUTES, 60, 0))


CONDITIONS = {"Ready": 1, "Progressing": 0, "Available": 1, "Degraded": 0}
OPERATOR = "fairlead-system"  # namespace


def operator(family: str, pod: str = "op-a", namespace: str = OPERATOR, **labels: str) -> str:
    return name(f"fairlead_operator_{family}", namespace=namespace, pod=pod, **labels)


def healthy_operator() -> dict[str, str]:
    """Series of a leader that lists its objects every five minutes, and of its standby."""
    return {
        operator("leading"): gauge((1, MINUTES)),
        operator("leading", "op-b"): gauge((0, MINUTES)),
        operator("reconcile_errors_total", error="ApiError"): counter((0, MINUTES)),
        operator("seconds_since_resync"): sawtooth(5),
        operator("seconds_since_resync", "op-b"): gauge((0, MINUTES)),
    }
