"""`fairlead simulate --trace FILE --pods N --policy …`."""

import argparse
import json
from pathlib import Path
from typing import Any

from rich.progress import track
from rich.table import Table

from fairlead.console import make_console
from fairlead.errors import UserError
from fairlead.simulate.plot import draw_svg
from fairlead.simulate.pods import PodModel
from fairlead.simulate.policies import OURS, POLICIES
from fairlead.simulate.replay import Outcome, replay
from fairlead.simulate.trace import read_trace, rotate

TARGET = 0.9
"""Upper limit of Fairlead's mean TTFT divided by that of the best other policy."""
Runs = dict[str, list[Outcome]]


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    simulate = commands.add_parser("simulate", help="compare routing policies on a recorded trace with modelled pods")
    add = simulate.add_argument
    add("--trace", type=Path, required=True, metavar="FILE", help="a Mooncake trace, JSON lines")
    add("--pods", type=int, default=16, metavar="N")
    add("--policy", action="append", choices=[*POLICIES, "all"], metavar="P", help=f"{', '.join(POLICIES)}; again for more (default all)")
    add("--speed", type=float, default=1.0, metavar="X", help="replay X times as fast")
    add("--routers", type=int, default=1, metavar="N", help="number of routers; each knows only its own requests and Redis (default 1)")
    add("--repeats", type=int, default=1, metavar="N", help="runs of each policy, with other seeds and start times (default 1)")
    add("--redis-away", metavar="A:B", help="Redis outage for the policy fairlead, as shares of the run, such as 0.25:0.75")
    add("--num-prompts", type=int, metavar="N", help="replay the first N requests (default all)")
    add("--prefill-rate", type=float, default=8000.0, metavar="R", help="prompt tokens per second of one pod (default 8000)")
    add("--cache-blocks", type=int, default=1500, metavar="C", help="cache size of one pod in blocks of 512 tokens (default 1500)")
    add("--token-seconds", type=float, default=0.02, metavar="S", help="seconds per output token (default 0.02)")
    add(
        "--report-seconds",
        type=float,
        default=0.5,
        metavar="S",
        help="seconds between two load reports of a worker (default 0.5; 0: always current)",
    )
    add("--seed", type=int, default=0, metavar="N")
    add("--plot", type=Path, metavar="FILE", help="write a chart as SVG")
    add("--json", type=Path, metavar="FILE", help="write all figures as JSON")
    simulate.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    _check(arguments)
    requests = read_trace(arguments.trace, count=arguments.num_prompts, speed=arguments.speed)
    model = PodModel(
        arguments.prefill_rate, arguments.cache_blocks, token_seconds=arguments.token_seconds, report_seconds=arguments.report_seconds
    )
    chosen = list(POLICIES) if not arguments.policy or "all" in arguments.policy else list(dict.fromkeys(arguments.policy))
    span = requests[-1].at - requests[0].at
    away = _window(arguments.redis_away)
    window = (away[0] * span, away[1] * span) if away else None
    runs: Runs = {policy: [] for policy in chosen}
    plan = [(policy, repeat) for policy in chosen for repeat in range(arguments.repeats)]
    for policy, repeat in track(plan, "replaying", console=make_console(), transient=True):
        rotated = rotate(requests, repeat / arguments.repeats)
        runs[policy].append(replay(policy, rotated, arguments.pods, model, arguments.seed + repeat, arguments.routers, window))
    title = ", ".join(
        [f"{len(requests)} requests, {arguments.pods} pods, {arguments.speed:g}x speed"]
        + ([f"{arguments.routers} routers"] if arguments.routers > 1 else [])
        + ([f"{arguments.repeats} runs"] if arguments.repeats > 1 else [])
        + ([f"Redis away {arguments.redis_away}"] if window else [])
    )
    show(runs, title)
    if arguments.json:
        arguments.json.write_text(json.dumps(_record(arguments, runs), indent=2))
    if arguments.plot:
        arguments.plot.write_text(draw_svg([_merge(outcomes) for outcomes in runs.values()], title))
    return 0


def _check(arguments: argparse.Namespace) -> None:
    for flag in ("pods", "speed", "prefill_rate", "cache_blocks", "routers", "repeats"):
        if not getattr(arguments, flag) > 0:  # written so that nan is refused too
            raise UserError(f"--{flag.replace('_', '-')} {getattr(arguments, flag)}: must be above 0")
    for flag in ("token_seconds", "report_seconds"):
        if not getattr(arguments, flag) >= 0:
            raise UserError(f"--{flag.replace('_', '-')} {getattr(arguments, flag)}: must not be below 0")
    if arguments.num_prompts is not None and arguments.num_prompts < 1:
        raise UserError(f"--num-prompts {arguments.num_prompts}: must be at least 1")
    _window(arguments.redis_away)
    for flag, path in (("json", arguments.json), ("plot", arguments.plot)):
        try:  # before minutes of replay are lost
            if path:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.open("a").close()
        except OSError as error:
            raise UserError(f"--{flag} {path}: cannot be written ({error.strerror})") from None


def _window(text: str | None) -> tuple[float, float] | None:
    if text is None:
        return None
    try:
        start, end = (float(part) for part in text.split(":"))
    except ValueError:
        raise UserError(f"--redis-away {text}: give two shares of the run, as 0.25:0.75") from None
    if not 0 <= start < end <= 1:
        raise UserError(f"--redis-away {text}: the shares must rise, from 0 to 1")
    return start, end


def average(outcomes: list[Outcome]) -> dict[str, float]:
    """Return each figure's mean over the runs."""
    each = [outcome.figures() for outcome in outcomes]
    return {name: sum(figures[name] for figures in each) / len(each) for name in each[0]}


def show(runs: Runs, title: str) -> None:
    """Print a table, and one line `name measured target verdict` for each target that these runs can check."""
    console = make_console()
    table = Table(title=title)
    table.add_column("policy")
    for heading in ("hit rate", "TTFT mean s", "p50", "p90", "p99", "busiest / mean"):
        table.add_column(heading, justify="right")
    for policy, outcomes in runs.items():
        hit, *rest = average(outcomes).values()
        table.add_row(policy, f"{hit:.1%}", *(f"{value:.2f}" for value in rest))
    console.print(table)
    peers = {policy: average(outcomes)["ttft_mean"] for policy, outcomes in runs.items() if policy not in OURS}
    if "fairlead" in runs and peers:
        best = min(peers, key=peers.__getitem__)
        _print_verdict(f"simulate_ttft_mean_over_{best}", _max_ratio(runs, "fairlead", best, "ttft_mean"), TARGET)
        _print_verdict(f"simulate_ttft_p99_over_{best}", _max_ratio(runs, "fairlead", best, "ttft_p99"), 1.0)
    if "fairlead-no-redis" in runs and "least-load" in runs:
        _print_verdict("simulate_no_redis_ttft_mean_over_least-load", _max_ratio(runs, "fairlead-no-redis", "least-load", "ttft_mean"), 1.0)


def _max_ratio(runs: Runs, ours: str, other: str, figure: str) -> float:
    """Return the highest ratio of any pair of runs with the same requests and start time."""
    pairs = zip(runs[ours], runs[other], strict=True)
    return max(one.figures()[figure] / max(two.figures()[figure], 1e-9) for one, two in pairs)


def _print_verdict(name: str, ratio: float, target: float) -> None:
    print(f"{name} {ratio:.2f} {target} {'ok' if ratio <= target else 'short'}")


def _merge(outcomes: list[Outcome]) -> Outcome:
    hit = sum(outcome.hit_rate for outcome in outcomes) / len(outcomes)
    ttft = [seconds for outcome in outcomes for seconds in outcome.ttft]
    return Outcome(outcomes[0].policy, ttft, [tokens for outcome in outcomes for tokens in outcome.computed], hit)


def _record(arguments: argparse.Namespace, runs: Runs) -> dict[str, Any]:
    parameters = {name: value for name, value in vars(arguments).items() if isinstance(value, int | float | str) and name != "command"}
    policies = {policy: {"mean": average(outcomes), "runs": [each.figures() for each in outcomes]} for policy, outcomes in runs.items()}
    return {"trace": arguments.trace.name, "parameters": parameters, "policies": policies}
