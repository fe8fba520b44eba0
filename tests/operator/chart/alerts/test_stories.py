"""From pods to alerts: stories of an hour, the conditions that the operator writes in them, and the alerts that Prometheus then fires.

The conditions come from the pure function over a model of the controllers, and promtool evaluates the chart's rules over them.
"""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.operator.status.histories import World

from .series import MINUTES, STEP, Fleet, gauge, healthy_operator
from .test_alerts import ALERTS, expected, promtool, rule_file

__all__ = ["rule_file"]
NOT_READY, DEGRADED = "FairleadServiceNotReady", "FairleadServiceDegraded"
CHAT = Fleet()
Script = Callable[[World, float], None]  # changes the world at a minute


@dataclass(frozen=True)
class Story:
    """`alerts`: alert → (minutes until it is silent, minute at which it fires). All others stay silent for the whole hour."""

    title: str
    script: Script
    alerts: dict[str, tuple[float, float]]
    workers: int = 4
    loading: float = 0.5  # minutes that a worker takes to start
    strategy: str = "Surge"
    scaled_to_zero: bool = False


def lose(state: str, count: int, begin: float = 10, end: float = MINUTES) -> Script:
    """The first `count` workers are in `state` from minute `begin` to `end`."""

    def script(world: World, minute: float) -> None:
        for pod in [pod for pod in world.pods if pod.component == "worker"][:count]:
            if begin <= minute < end:
                world.put(pod, state, stuck=True)
            elif minute == end:
                world.put(pod, "Ready")

    return script


def lose_router(world: World, minute: float) -> None:
    if minute == 10:
        world.put(world.of("router")[0], "NotReady", stuck=True)


def evict(world: World, minute: float) -> None:
    if minute == 10:
        world.put(world.of("worker")[0], "Evicted")


def edit(world: World, minute: float) -> None:
    if minute == 10:
        world.edit()


def edit_badly(world: World, minute: float) -> None:
    edit(world, minute)
    for pod in world.of("worker"):
        if minute >= 10 and pod.revision == world.revision("worker"):
            world.put(pod, "ImagePullBackOff", stuck=True)


def grow(world: World, minute: float) -> None:
    if minute == 10:
        world.resize(10)


def sleep(world: World, minute: float) -> None:
    if minute == 10:
        world.resize(0)
    if minute == 40:
        world.resize(1)


def fail_completions(world: World, minute: float) -> None:
    if minute == 10:
        world.edit()
    world.router_fails = minute >= 10


STORIES = (
    Story("three of four workers are not ready for good", lose("NotReady", 3), {DEGRADED: (20, 22.5)}),
    Story("one of four workers is not ready for good", lose("NotReady", 1), {DEGRADED: (20, 22.5)}),
    Story("no worker is ready", lose("NotReady", 4), {NOT_READY: (24.5, 25.5), DEGRADED: (20, 22.5)}),
    Story("a worker loads forever", lose("Loading", 1), {DEGRADED: (28, 30.5)}),
    Story("a queue does not admit a worker", lose("SchedulingGated", 1), {DEGRADED: (28, 30.5)}),
    Story("a worker's memory is too small", lose("OOMKilled", 1), {DEGRADED: (19.5, 20.5)}),
    Story("a claim is not bound", lose("FailedScheduling", 1), {DEGRADED: (19.5, 20.5)}),
    Story("a router is not ready for good", lose_router, {DEGRADED: (20, 22.5)}),
    Story("an edit names an image that does not exist", edit_badly, {DEGRADED: (19.5, 20.5)}),
    Story("completions fail after an edit", fail_completions, {NOT_READY: (24.5, 40), DEGRADED: (19.5, 40)}),
    Story("a worker drains for 90 s", lose("NotReady", 1, 10, 11.5), {}),
    Story("a worker is not ready for eight minutes", lose("NotReady", 1, 10, 18), {}),
    Story("a worker is evicted, and its successor is ready after four minutes", evict, {}, loading=4),
    Story("a rollout with a surge of two minutes for each worker", edit, {}, loading=2),
    Story("a rollout that drains first, of eight minutes for each worker", edit, {}, loading=8, strategy="DrainFirst"),
    Story("six workers are added, and take nine minutes", grow, {}, loading=9),
    Story("asleep for half an hour, then woken", sleep, {}, workers=1, scaled_to_zero=True),
)


def play(story: Story) -> dict[str, str]:
    """Return the series of the service's conditions. A pod that is not stuck is ready after `story.loading`."""
    world = World(random.Random(1), desired=story.workers, strategy=story.strategy, scaled_to_zero=story.scaled_to_zero)
    world.start_seconds = story.loading * 60
    seen: dict[str, list[tuple[float, float]]] = {CHAT.workers(): []}
    for _ in range(60):  # it was created an hour ago
        world.tick(60.0)
        world.reconcile()
    for index in range(int(MINUTES / STEP)):
        story.script(world, index * STEP)
        world.tick(STEP * 60)
        world.reconcile()
        for one in world.status.conditions:
            if one.type in ("Ready", "Available", "Progressing", "Degraded"):
                seen.setdefault(CHAT.condition(one.type), []).append((float(one.status == "True"), STEP))
        seen[CHAT.workers()].append((float(world.status.desired_replicas), STEP))
    return {name: gauge(*values) for name, values in seen.items()}


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.title.replace(" ", "-"))
def test_the_alerts_of_a_story_are_those_of_its_fault(story: Story, rule_file: Path, tmp_path: Path) -> None:
    series = {**CHAT.healthy(), **healthy_operator(), **play(story)}
    checks = []
    for alert in (NOT_READY, DEGRADED):
        silent_until, at = story.alerts.get(alert, (MINUTES, None))
        checks += [(index * STEP, alert, []) for index in range(int(MINUTES / STEP)) if index * STEP < silent_until]
        if at is not None:
            checks.append((at, alert, [expected(alert, CHAT.labels, "")]))
            checks.append((MINUTES - STEP, alert, [expected(alert, CHAT.labels, "")]))
    checks += [(MINUTES - STEP, alert, []) for alert in ALERTS if alert not in (NOT_READY, DEGRADED)]
    rules = [{"eval_time": f"{time * 60:.0f}s", "alertname": alert, "exp_alerts": alerts} for time, alert, alerts in checks]
    made = [{"series": name, "values": values} for name, values in series.items()]
    test = {"name": story.title, "interval": f"{STEP * 60:.0f}s", "input_series": made, "alert_rule_test": rules}
    path = tmp_path / "story.yaml"
    path.write_text(json.dumps({"rule_files": [str(rule_file)], "evaluation_interval": f"{STEP * 60:.0f}s", "tests": [test]}))
    promtool("test", "rules", str(path))
