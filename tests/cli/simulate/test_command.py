"""`fairlead simulate`: every policy on a small trace, the outputs, and the errors for an invalid trace."""

import json
import random
from array import array
from itertools import pairwise
from pathlib import Path

import pytest

from fairlead.main import main
from fairlead.simulate.policies import POLICIES
from fairlead.simulate.replay import Scenario, replay
from fairlead.simulate.workloads.request import BLOCK_TOKENS, Request, rotate
from fairlead.simulate.workloads.traces import read_mooncake


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Twelve conversations that grow by two blocks a turn; all share their first block."""
    draw, lines, fresh = random.Random(1), [], iter(range(1, 10_000))
    talks: list[list[int]] = [[0] for _ in range(12)]
    for number in range(240):
        talk = talks[draw.randrange(12)]
        talk += [next(fresh), next(fresh)]
        length = len(talk) * BLOCK_TOKENS - draw.randrange(BLOCK_TOKENS)
        lines.append({"timestamp": number * 300, "input_length": length, "output_length": 50, "hash_ids": list(talk)})
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return path


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_serves_every_request_and_is_deterministic(policy: str, trace: Path) -> None:
    requests = read_mooncake(trace, count=None, speed=2.0)
    outcome = replay(policy, requests, Scenario(4), seed=7)
    assert len(outcome.ttft) == 240 and min(outcome.ttft) > 0 and len(outcome.computed) == 4
    assert 0 <= outcome.hit_rate < 1 <= outcome.imbalance
    assert outcome == replay(policy, requests, Scenario(4), seed=7)
    several = replay(policy, requests, Scenario(4, routers=3), seed=7)
    assert len(several.ttft) == 240 and several == replay(policy, requests, Scenario(4, routers=3), seed=7)


def test_routing_by_the_index_beats_round_robin(trace: Path) -> None:
    requests = read_mooncake(trace, count=None, speed=4.0)
    ours, turns = (replay(policy, requests, Scenario(4)).figures() for policy in ("fairlead", "round-robin"))
    assert ours["hit_rate"] > turns["hit_rate"] + 0.15
    assert ours["ttft_mean"] < 0.7 * turns["ttft_mean"]


def test_routers_share_reservations() -> None:
    """A burst of new prompts through many routers between two load reports: with Redis no pod gets much more than its share."""
    burst = [Request(5.0, 1024, 1, array("Q", [2 * number, 2 * number + 1])) for number in range(64)]
    shared, alone = (replay(policy, burst, Scenario(8, routers=64)).imbalance for policy in ("fairlead", "least-load"))
    assert shared <= 1.3 < alone


def test_the_router_chooses_alone_while_redis_is_down_and_by_the_index_afterwards(trace: Path) -> None:
    requests = read_mooncake(trace, count=None, speed=4.0)
    whole, none, half = (
        replay(policy, requests, Scenario(4, redis_away=away)).figures()
        for policy, away in (("fairlead", None), ("fairlead-no-redis", None), ("fairlead", (0.0, requests[-1].at / 2)))
    )
    assert max(none["hit_rate"], half["hit_rate"]) < whole["hit_rate"]
    assert none["ttft_mean"] <= replay("least-load", requests, Scenario(4)).figures()["ttft_mean"]


def test_a_trace_with_another_start_time_has_the_same_requests_and_pauses(trace: Path) -> None:
    requests = read_mooncake(trace, count=None, speed=1.0)
    turned = rotate(requests, 1 / 3)
    assert [request.blocks for request in turned] == [request.blocks for request in requests[80:] + requests[:80]]
    assert turned[0].at == 0 and all(early.at <= late.at for early, late in pairwise(turned))
    assert turned[-1].at <= requests[-1].at and rotate(requests, 0) == requests


def test_the_command_prints_a_table_and_writes_json(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "figures.json"
    flags = ["--pods", "3", "--repeats", "2", "--policy", "fairlead", "--policy", "random", "--json", str(out)]
    with pytest.raises(SystemExit) as ended:
        main(["simulate", "--trace", str(trace), *flags])
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    assert "240 requests, 3 pods" in printed
    written = json.loads(out.read_text())
    figures = written["policies"]
    assert list(figures) == ["fairlead", "random"] and set(figures["random"]["mean"]) >= {"hit_rate", "ttft_p99", "imbalance"}
    assert written["parameters"]["repeats"] == 2 and len(figures["fairlead"]["runs"]) == 2


def test_the_table_names_every_policy_and_class_in_full(capsys: pytest.CaptureFixture[str]) -> None:
    policies = ["fairlead", "fairlead-no-redis", "fairlead-fcfs"]
    flags = [flag for policy in policies for flag in ("--policy", policy)]
    flags += ["--class", "interactive:0.5:2:0.5:0.1", "--class", "background:0.5:inf:0:inf"]
    with pytest.raises(SystemExit) as ended:
        main(["simulate", "--workload", "zipf", "--num-prompts", "20", "--pods", "2", *flags])
    assert ended.value.code == 0
    title, header, *rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert title[0] == "20" and {"goodput/s", "interactive/s", "background/s"} < set(header)
    assert [row[0] for row in rows] == policies


def test_a_sweep_writes_the_figures_of_each_speed(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    policies = [flag for policy in ("fairlead", "least-load", "random") for flag in ("--policy", policy)]
    flags = ["--num-prompts", "150", "--pods", "3", "--sweep", "0.5,1.5", *policies, "--json", str(out)]
    with pytest.raises(SystemExit) as ended:
        main(["simulate", "--workload", "zipf", *flags])
    assert ended.value.code == 0
    cells = json.loads(out.read_text())["sweep"]
    assert [cell["speed"] for cell in cells] == [0.5, 1.5] and cells[0]["load"] == pytest.approx(0.5, rel=0.02)


@pytest.mark.parametrize(
    ("text", "arguments", "words"),
    [
        ('{"timestamp": 0}', [], "hash_ids is missing; a line is a JSON object with the numbers timestamp"),
        ("{", [], "line 1: not a Mooncake trace entry: Expecting property name"),
        ("", [], "it contains no request"),
        ('{"timestamp": NaN, "input_length": 1, "output_length": 1, "hash_ids": [1]}', [], "line 1: not a Mooncake trace entry"),
        ('{"timestamp": 0, "input_length": -1, "output_length": 1, "hash_ids": [1]}', [], "a number is below 0"),
        ('{"timestamp": 0, "input_length": 1e18, "output_length": 1, "hash_ids": [1]}', [], "a length above 100000000"),
        (None, [], "No such file"),
        ("", ["--json", "/proc/no/such.json"], "--json /proc/no/such.json: cannot be written"),
        ("", ["--pods", "0"], "--pods 0: must be above 0"),
        ("", ["--speed", "inf"], "--speed inf: must be above 0 and finite"),
        ("", ["--class", "a:inf:1:1:1"], "--class a:inf:1:1:1: give NAME:SHARE:A:B:C"),
        ("", ["--autoscale", "x"], "--autoscale x: give MIN:MAX, as 1:20\n"),
        ("", ["--autoscale", "1:4", "--class", "a:1:inf:0:1"], "--autoscale 1:4: class a has no bound of TTFT: give its A and B"),
        ("", ["--autoscale", "1:4", "--stabilization-seconds", "-1"], "--stabilization-seconds -1: must be finite and not below 0"),
        ("", ["--class", "a:1:1:1:1", "--class", "a:1:2:1:1"], "--class: a is given twice"),
        ("", ["--autoscale", "6:1"], "minReplicas must be at most spec.scaling.maxReplicas"),
        ("", ["--seconds", "nan"], "--seconds nan: must be above 0"),
        ("", ["--seconds", "9", "--num-prompts", "9"], "--seconds and --num-prompts exclude each other"),
        ("", ["--sweep", "1e-300"], "1e-300: every speed must be at least 0.001"),
        ("", ["--redis-away", "0.5"], "--redis-away 0.5: give two shares"),
        ("", ["--redis-away", "0.5:0.2"], "--redis-away 0.5:0.2: the shares must rise"),
        ("", ["--report-seconds", "-1"], "--report-seconds -1.0: must be finite and not below 0"),
        ("", ["--step-seconds", "0.07"], "--step-seconds 0.07: must be below --chunk-tokens / --prefill-rate, the 0.064 s"),
    ],
)
def test_an_invalid_trace_is_named(
    text: str | None, arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "t.jsonl"
    if text is not None:
        path.write_text(text)
    with pytest.raises(SystemExit) as ended:
        main(["simulate", "--trace", str(path), *arguments])
    assert ended.value.code == 2
    assert words in capsys.readouterr().err
