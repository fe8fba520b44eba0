"""`fairlead simulate --trace FILE --pods N --policy …`."""

import argparse
import json
from pathlib import Path

from rich.table import Table

from fairlead.console import make_console
from fairlead.errors import UserError
from fairlead.simulate.pods import PodModel
from fairlead.simulate.policies import POLICIES
from fairlead.simulate.replay import Outcome, replay
from fairlead.simulate.trace import read_trace

TARGET = 0.9
"""Our mean TTFT over that of the best other policy."""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    simulate = commands.add_parser("simulate", help="a recorded trace against modelled pods: what a routing policy is worth")
    add = simulate.add_argument
    add("--trace", type=Path, required=True, metavar="FILE", help="a Mooncake trace, JSON lines")
    add("--pods", type=int, default=16, metavar="N")
    add("--policy", action="append", choices=[*POLICIES, "all"], metavar="P", help=f"{', '.join(POLICIES)}; again for more (default all)")
    add("--speed", type=float, default=1.0, metavar="X", help="play it X times as fast")
    add("--num-prompts", type=int, metavar="N", help="the first N requests (default all)")
    add("--prefill-rate", type=float, default=8000.0, metavar="R", help="prompt tokens a second of one pod (default 8000)")
    add("--cache-blocks", type=int, default=1500, metavar="C", help="of 512 tokens, of one pod (default 1500)")
    add("--token-seconds", type=float, default=0.02, metavar="S", help="of one output token (default 0.02)")
    add("--report-seconds", type=float, default=0.5, metavar="S", help="between a worker's loads (default 0.5; 0: always fresh)")
    add("--seed", type=int, default=0, metavar="N")
    add("--json", type=Path, metavar="FILE", help="write all figures")
    simulate.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    for flag in ("pods", "speed", "prefill_rate", "cache_blocks"):
        if getattr(arguments, flag) <= 0:
            raise UserError(f"--{flag.replace('_', '-')} {getattr(arguments, flag)}: must be above 0")
    for flag in ("token_seconds", "report_seconds"):
        if getattr(arguments, flag) < 0:
            raise UserError(f"--{flag.replace('_', '-')} {getattr(arguments, flag)}: must not be below 0")
    if arguments.num_prompts is not None and arguments.num_prompts < 1:
        raise UserError(f"--num-prompts {arguments.num_prompts}: must be at least 1")
    requests = read_trace(arguments.trace, count=arguments.num_prompts, speed=arguments.speed)
    model = PodModel(
        arguments.prefill_rate, arguments.cache_blocks, token_seconds=arguments.token_seconds, report_seconds=arguments.report_seconds
    )
    chosen = list(POLICIES) if not arguments.policy or "all" in arguments.policy else list(dict.fromkeys(arguments.policy))
    outcomes = [replay(policy, requests, arguments.pods, model, arguments.seed) for policy in chosen]
    show(outcomes, len(requests), arguments.pods)
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps({outcome.policy: outcome.figures() for outcome in outcomes}, indent=2))
    return 0


def show(outcomes: list[Outcome], requests: int, pods: int) -> None:
    """A table for people; and one line `name measured target verdict` when there are others to compare with."""
    console = make_console()
    table = Table(title=f"{requests} requests, {pods} pods")
    table.add_column("policy")
    for heading in ("hit rate", "TTFT mean s", "p50", "p90", "p99", "busiest / mean"):
        table.add_column(heading, justify="right")
    for outcome in outcomes:
        hit, *rest = outcome.figures().values()
        table.add_row(outcome.policy, f"{hit:.1%}", *(f"{value:.2f}" for value in rest))
    console.print(table)
    means = {outcome.policy: outcome.figures()["ttft_mean"] for outcome in outcomes}
    ours = means.pop("fairlead", None)
    means.pop("fairlead-alone", None)  # ours as well
    if ours is not None and means:
        best = min(means, key=means.__getitem__)
        ratio = ours / max(means[best], 1e-9)
        print(f"simulate_ttft_mean_over_{best} {ratio:.2f} {TARGET} {'ok' if ratio <= TARGET else 'short'}")
