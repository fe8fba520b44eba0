"""The operator's autoscaler on modelled pods: sizes follow the load, pods are paid from creation to end, the least useful one goes."""

import dataclasses
import json
from itertools import pairwise
from pathlib import Path

import pytest
from tests.cli.simulate.test_replay import arrivals

from fairlead.main import main
from fairlead.simulate.outcome import Outcome
from fairlead.simulate.pods import PodModel
from fairlead.simulate.replay import Scenario, replay
from fairlead.simulate.workloads.request import Request
from fairlead_operator.api.scaling import Scaling

START = 20.0
SCALING = Scaling.model_validate(
    {"minReplicas": 1, "maxReplicas": 12, "target": {"ttftMilliseconds": 4000}, "scaleDown": {"stabilizationWindowSeconds": 60}}
)


def play(requests: list[Request], routers: int = 1) -> Outcome:
    return replay("fairlead", requests, Scenario(1, PodModel(start_seconds=START), routers, autoscale=SCALING))


def test_pods_follow_a_step_of_load_up_and_down_and_are_paid_from_creation_to_end() -> None:
    """One request per second, eight per second from 60 to 210 s (four pods' work), then one again."""
    times = [*range(60), *(60 + number / 8 for number in range(1200)), *range(210, 400)]
    requests = [dataclasses.replace(one, at=float(at)) for one, at in zip(arrivals(len(times), 1.0), times, strict=True)]
    outcome = play(requests)
    sizes = [size for _, size in outcome.sizes]
    begun = next(at for at, size in outcome.sizes if size >= 4)
    assert 60 < begun < 110 and 4 <= max(sizes) <= 8 and sizes[-1] <= 2, outcome.sizes
    late = [seconds for seconds, one in zip(outcome.ttft, requests, strict=True) if 180 < one.at < 210]
    assert max(late) < 4.0, "the load is served within the target once the backlog is gone"
    paid = sum(size * (after - at) for (at, size), (after, _) in pairwise(outcome.sizes))
    assert outcome.pod_seconds == pytest.approx(paid + sizes[-1] * (outcome.ended_at - outcome.sizes[-1][0]))
    assert outcome == play(requests)
    assert len(play(requests, routers=3).served) == len(requests)


def test_the_last_request_starts_a_pod_again_after_a_scale_to_zero() -> None:
    scaling = Scaling.model_validate({"minReplicas": 0, "maxReplicas": 4, "target": {"ttftMilliseconds": 4000}})
    requests = [dataclasses.replace(one, at=at) for one, at in zip(arrivals(3, 1.0), (0.0, 1.0, 3000.0), strict=True)]
    outcome = replay("fairlead", requests, Scenario(1, PodModel(start_seconds=START), autoscale=scaling))
    assert [size for _, size in outcome.sizes] == [1, 0, 1] and START < outcome.ttft[-1] < START + 10


def test_the_command_scales_within_the_bounds(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    flags = [
        "--json",
        str(out),
        "--num-prompts",
        "150",
        "--pods",
        "2",
        "--policy",
        "fairlead",
        "--autoscale",
        "1:4",
        "--class",
        "all:1:5:0.5:inf",
    ]
    with pytest.raises(SystemExit) as ended:
        main(["simulate", "--workload", "zipf", *flags])
    assert ended.value.code == 0
    assert json.loads(out.read_text())["policies"]["fairlead"]["mean"]["pod_hours"] > 0
