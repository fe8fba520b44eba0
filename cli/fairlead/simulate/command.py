"""`fairlead simulate --workload NAME|FILE --pods N --policy …`."""

import argparse
import json
import math
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from rich.progress import track

from fairlead.console import make_console
from fairlead.errors import UserError
from fairlead.simulate.failures import draw_failures, parse_failure
from fairlead.simulate.outcome import Outcome
from fairlead.simulate.plot import draw_svg
from fairlead.simulate.pods import PodModel
from fairlead.simulate.policies import POLICIES
from fairlead.simulate.replay import Scenario, replay
from fairlead.simulate.report import Cell, average, show
from fairlead.simulate.service_classes import DEFAULT_CLASSES, ServiceClass, parse_class
from fairlead.simulate.static_fleet import find_static_fleet
from fairlead.simulate.sweep_plot import draw_sweep
from fairlead.simulate.workloads.catalog import GENERATORS, load, offered_load
from fairlead.simulate.workloads.request import Request, necessary_tokens
from fairlead_operator.api.scaling import DEFAULT_STABILIZATION_WINDOW_SECONDS, Scaling

MOST_SECONDS = 86_400


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    simulate = commands.add_parser("simulate", help="compare routing policies on a workload with modelled pods")
    add = simulate.add_argument
    add(
        "--workload",
        "--trace",
        required=True,
        metavar="NAME|FILE",
        help=f"{', '.join(GENERATORS)}, a Mooncake trace (JSON lines), or an Azure trace of 2023 (.csv)",
    )
    add("--pods", type=int, default=16, metavar="N")
    add("--policy", action="append", choices=[*POLICIES, "all"], metavar="P", help=f"{', '.join(POLICIES)}; again for more (default all)")
    add(
        "--speed", type=float, default=1.0, metavar="X", help="replay X times as fast; generators: load, 1 is all that the pods can compute"
    )
    add("--sweep", type=_numbers, metavar="A,B,C", help="several speeds, with the ratio to the best peer at each")
    add("--routers", type=int, default=1, metavar="N", help="number of routers; each knows only its own requests and Redis (default 1)")
    add("--repeats", type=int, default=1, metavar="N", help="runs of each policy, with other seeds, and start times of a trace (default 1)")
    add(
        "--class",
        dest="classes",
        action="append",
        metavar="NAME:SHARE:A:B:C",
        help="a share of the requests with TTFT <= A + B per 1,000 uncached tokens and ITL <= C seconds; again for more, the most urgent "
        "first. With it our routers refuse what they cannot serve in time (default all:1:2:0.5:0.1, which routers do not know)",
    )
    add("--fail", action="append", default=[], metavar="POD@SECONDS[+SECONDS]", help="a pod fails, and is ready again after that time")
    add("--mean-seconds-to-failure", type=float, metavar="S", help="pods also fail at random, each with this mean time between failures")
    add("--start-seconds", type=float, default=60.0, metavar="S", help="seconds from a pod's creation until it is ready (default 60)")
    add("--autoscale", metavar="MIN:MAX", help="let the operator's autoscaler set the number of pods, for the bounds of the first class")
    add(
        "--stabilization-seconds",
        type=int,
        default=DEFAULT_STABILIZATION_WINDOW_SECONDS,
        metavar="S",
        help="spec.scaling.scaleDown of --autoscale: pods go once fewer were enough for this long (default 300)",
    )
    add("--redis-away", metavar="A:B", help="Redis outage for the policy fairlead, as shares of the run, such as 0.25:0.75")
    add("--num-prompts", type=int, metavar="N", help="replay the first N requests (default all; generators: 6000)")
    add("--seconds", type=float, metavar="S", help="replay as many requests as arrive in S seconds, so that all speeds have the same span")
    add("--prefill-rate", type=float, default=8000.0, metavar="R", help="prompt tokens per second of one pod (default 8000)")
    add("--cache-blocks", type=int, default=1500, metavar="C", help="cache size of one pod in blocks of 512 tokens (default 1500)")
    add("--step-seconds", type=float, default=0.01, metavar="S", help="seconds of a step without prompt and context (default 0.01)")
    add(
        "--context-seconds",
        type=float,
        default=2.4e-8,
        metavar="S",
        help="seconds that a step takes longer for each token of context of its decodes (default 2.4e-8)",
    )
    add("--chunk-tokens", type=int, default=512, metavar="N", help="prompt tokens of a step (default 512)")
    add(
        "--report-seconds",
        type=float,
        default=0.5,
        metavar="S",
        help="seconds between two load reports of a worker (default 0.5; 0: always current)",
    )
    add("--seed", type=int, default=0, metavar="N")
    add(
        "--plot",
        type=Path,
        metavar="FILE",
        help="write a chart as SVG: of the TTFT; with --sweep, of TTFT and goodput over the load",
    )
    add("--json", type=Path, metavar="FILE", help="write all figures as JSON")
    simulate.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    _check(arguments)
    cells = [_play(arguments, speed) for speed in arguments.sweep or [arguments.speed]]
    title = ", ".join(
        [f"{cells[0].requests} requests, {arguments.pods} pods"]
        + ([] if arguments.sweep else [f"{arguments.speed:g}x speed"])
        + ([f"{arguments.routers} routers"] if arguments.routers > 1 else [])
        + ([f"{arguments.repeats} runs"] if arguments.repeats > 1 else [])
        + ([f"autoscaled {arguments.autoscale}"] if arguments.autoscale else [])
        + (["with failures"] if arguments.fail or arguments.mean_seconds_to_failure else [])
        + ([f"Redis away {arguments.redis_away}"] if arguments.redis_away else [])
    )
    show(cells, title)
    if arguments.json:
        arguments.json.write_text(json.dumps(_record(arguments, cells), indent=2))
    if arguments.plot:
        arguments.plot.write_text(draw_sweep(cells, title) if arguments.sweep else draw_svg(cells[0].runs, title))
    return 0


def _play(arguments: argparse.Namespace, speed: float) -> Cell:
    """Replay the workload with each policy at one speed."""
    model, pods = _model(arguments), arguments.pods
    seeds = [arguments.seed + repeat for repeat in range(arguments.repeats)]
    played = load(
        arguments.workload, count=arguments.num_prompts, speed=speed, pods=pods, model=model, seeds=seeds, seconds=arguments.seconds
    )
    chosen = list(POLICIES) if not arguments.policy or "all" in arguments.policy else list(dict.fromkeys(arguments.policy))
    runs: dict[str, list[Outcome]] = {policy: [] for policy in chosen}
    static: dict[str, list[Outcome]] = {policy: [] for policy in chosen if arguments.autoscale}
    plan = [(policy, seed, requests) for policy in chosen for seed, requests in zip(seeds, played, strict=True)]
    for policy, seed, requests in track(plan, f"replaying at speed {speed:g}", console=make_console(), transient=True):
        scenario = _scenario(arguments, model, requests, seed)
        outcome = replay(policy, requests, scenario, seed)
        runs[policy].append(outcome)
        if scenario.autoscale is not None:
            static[policy].append(find_static_fleet(outcome, requests, scenario, seed))
    return Cell(speed, offered_load(played[0], pods, model), len(played[0]), runs, static)


def _model(arguments: argparse.Namespace) -> PodModel:
    return PodModel(
        arguments.prefill_rate,
        arguments.cache_blocks,
        step_seconds=arguments.step_seconds,
        context_seconds=arguments.context_seconds,
        chunk_tokens=arguments.chunk_tokens,
        report_seconds=arguments.report_seconds,
        start_seconds=arguments.start_seconds,
    )


def _scenario(arguments: argparse.Namespace, model: PodModel, requests: list[Request], seed: int) -> Scenario:
    failures = [parse_failure(text) for text in arguments.fail]
    if arguments.mean_seconds_to_failure:
        failures += draw_failures(arguments.pods, requests[-1].at, arguments.mean_seconds_to_failure, seed)
    classes = [parse_class(text) for text in arguments.classes] if arguments.classes else DEFAULT_CLASSES
    scaling = _scaling(arguments, classes[0], requests)
    return Scenario(
        scaling.within(arguments.pods) if scaling else arguments.pods,
        model,
        arguments.routers,
        _window(arguments.redis_away, requests),
        classes=classes,
        has_bounds=bool(arguments.classes),
        autoscale=scaling,
        failures=failures,
    )


def _scaling(arguments: argparse.Namespace, one: ServiceClass, requests: list[Request]) -> Scaling | None:
    """Return bounds and target of the autoscaler. Its target is the bound of a request with the mean number of uncached tokens."""
    if arguments.autoscale is None:
        return None
    least, _, most = arguments.autoscale.partition(":")
    target = one.ttft + one.ttft_per_token * necessary_tokens(requests) / max(1, len(requests))
    try:
        return Scaling.model_validate(
            {
                "minReplicas": int(least),
                "maxReplicas": int(most),
                "target": {"ttftMilliseconds": round(1000 * target)},
                "scaleDown": {"stabilizationWindowSeconds": arguments.stabilization_seconds},
            }
        )
    except (ValueError, OverflowError) as error:
        reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
        raise UserError(f"--autoscale {arguments.autoscale}: give MIN:MAX, as 1:20, and a class with a bound of TTFT ({reason})") from None


def _check(arguments: argparse.Namespace) -> None:
    for flag in ("pods", "speed", "prefill_rate", "cache_blocks", "chunk_tokens", "step_seconds", "routers", "repeats"):
        if not getattr(arguments, flag) > 0:  # written so that nan is refused too
            raise UserError(f"--{flag.replace('_', '-')} {getattr(arguments, flag)}: must be above 0")
    for flag in ("context_seconds", "start_seconds", "report_seconds"):
        if not 0 <= getattr(arguments, flag) < math.inf:
            raise UserError(f"--{flag.replace('_', '-')} {getattr(arguments, flag)}: must be finite and not below 0")
    if arguments.num_prompts is not None and arguments.num_prompts < 1:
        raise UserError(f"--num-prompts {arguments.num_prompts}: must be at least 1")
    if arguments.seconds is not None and not 0 < arguments.seconds <= MOST_SECONDS:
        raise UserError(f"--seconds {arguments.seconds}: must be above 0 and at most {MOST_SECONDS}")
    if arguments.seconds is not None and arguments.num_prompts is not None:
        raise UserError("--seconds and --num-prompts exclude each other: give one of them")
    if arguments.step_seconds * arguments.prefill_rate >= arguments.chunk_tokens:
        raise UserError(
            f"--step-seconds {arguments.step_seconds}: must be below --chunk-tokens / --prefill-rate, the "
            f"{arguments.chunk_tokens / arguments.prefill_rate:g} s of a step with prompt tokens"
        )
    if arguments.mean_seconds_to_failure is not None and not arguments.mean_seconds_to_failure > 0:
        raise UserError(f"--mean-seconds-to-failure {arguments.mean_seconds_to_failure}: must be above 0")
    for failure in map(parse_failure, arguments.fail):
        if failure.pod >= arguments.pods:
            raise UserError(f"--fail: there is no pod {failure.pod}, they are 0 to {arguments.pods - 1}")
    names = [parse_class(text).name for text in arguments.classes or []]
    if repeated := {name for name in names if names.count(name) > 1}:
        raise UserError(f"--class: {', '.join(sorted(repeated))} is given twice; give each class its own name")
    _scaling(arguments, parse_class(arguments.classes[0]) if arguments.classes else DEFAULT_CLASSES[0], [])
    _window(arguments.redis_away, [])
    for flag, path in (("json", arguments.json), ("plot", arguments.plot)):
        try:  # before minutes of replay are lost
            if path:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.open("a").close()
        except OSError as error:
            raise UserError(f"--{flag} {path}: cannot be written ({error.strerror})") from None


def _numbers(text: str) -> list[float]:
    numbers = [float(part) for part in text.split(",")]
    if not all(number > 0 for number in numbers):
        raise argparse.ArgumentTypeError(f"{text}: every speed must be above 0")
    return numbers


def _window(text: str | None, requests: list[Request]) -> tuple[float, float] | None:
    """Return the start and end of an outage in seconds of the run."""
    if text is None:
        return None
    try:
        start, end = (float(part) for part in text.split(":"))
    except ValueError:
        raise UserError(f"--redis-away {text}: give two shares of the run, as 0.25:0.75") from None
    if not 0 <= start < end <= 1:
        raise UserError(f"--redis-away {text}: the shares must rise, from 0 to 1")
    span = requests[-1].at - requests[0].at if requests else 0.0
    return start * span, end * span


def _record(arguments: argparse.Namespace, cells: list[Cell]) -> dict[str, Any]:
    parameters = {
        name: value for name, value in vars(arguments).items() if isinstance(value, int | float | str | list) and name != "command"
    }

    def policies(cell: Cell) -> dict[str, Any]:
        return {
            policy: {"mean": average(outcomes), "runs": [each.figures() for each in outcomes]} for policy, outcomes in cell.runs.items()
        }

    record = {"workload": Path(arguments.workload).name, "parameters": parameters}
    if arguments.sweep:
        return record | {"sweep": [{"speed": cell.speed, "load": cell.load, "policies": policies(cell)} for cell in cells]}
    return record | {"policies": policies(cells[0])}
