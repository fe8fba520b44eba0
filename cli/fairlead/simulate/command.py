"""`fairlead simulate --workload NAME|FILE --pods N --policy …`."""

import json
import math
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from rich.progress import track

from fairlead.console import make_console
from fairlead.errors import UserError
from fairlead.options import takes
from fairlead.program import describe, new_app
from fairlead.simulate.catalog import load, offered_load
from fairlead.simulate.options import LEAST_SPEED, SimulateOptions
from fairlead.simulate.outcome import Outcome
from fairlead.simulate.pods import PodModel
from fairlead.simulate.replay import Scenario, replay
from fairlead.simulate.report import Cell, average, show
from fairlead.simulate.service_classes import DEFAULT_CLASSES, ServiceClass, parse_class
from fairlead.simulate.workloads.request import Request, necessary_tokens
from fairlead_operator.api.scaling import Scaling

app = new_app()

MOST_SECONDS = 86_400
MOST_PODS = 10_000


@app.command(
    help=describe(
        "Compare routing policies on a workload with modelled pods, by the real scorer and queue.",
        "fairlead simulate --workload agents --pods 16 --policy fairlead --policy least-load",
        "fairlead simulate --workload trace.jsonl --sweep 0.5,1,1.4",
    )
)
@takes(SimulateOptions)
def run(options: SimulateOptions) -> int:
    _check(options)
    cells = [_play(options, speed) for speed in options.speeds]
    title = ", ".join(
        [f"{cells[0].requests} requests, {options.pods} pods"]
        + ([] if options.sweep else [f"{options.speed:g}x speed"])
        + ([f"{options.routers} routers"] if options.routers > 1 else [])
        + ([f"{options.repeats} runs"] if options.repeats > 1 else [])
        + ([f"autoscaled {options.autoscale}"] if options.autoscale else [])
        + ([f"Redis away {options.redis_away}"] if options.redis_away else [])
    )
    show(cells, title)
    if options.json:
        options.json.write_text(json.dumps(_record(options, cells), indent=2))
    return 0


def _play(options: SimulateOptions, speed: float) -> Cell:
    """Replay the workload with each policy at one speed."""
    model, pods = _model(options), options.pods
    seeds = [options.seed + repeat for repeat in range(options.repeats)]
    played = load(options.workload, count=options.num_prompts, speed=speed, pods=pods, model=model, seeds=seeds, seconds=options.seconds)
    chosen = options.policies
    runs: dict[str, list[Outcome]] = {policy: [] for policy in chosen}
    plan = [(policy, seed, requests) for policy in chosen for seed, requests in zip(seeds, played, strict=True)]
    for policy, seed, requests in track(plan, f"replaying at speed {speed:g}", console=make_console(), transient=True):
        runs[policy].append(replay(policy, requests, _scenario(options, model, requests), seed))
    return Cell(speed, offered_load(played[0], pods, model), len(played[0]), runs)


def _model(options: SimulateOptions) -> PodModel:
    return PodModel(
        options.prefill_rate,
        options.cache_blocks,
        step_seconds=options.step_seconds,
        context_seconds=options.context_seconds,
        chunk_tokens=options.chunk_tokens,
        report_seconds=options.report_seconds,
        start_seconds=options.start_seconds,
    )


def _scenario(options: SimulateOptions, model: PodModel, requests: list[Request]) -> Scenario:
    classes = [parse_class(text) for text in options.classes] if options.classes else DEFAULT_CLASSES
    scaling = _scaling(options, classes[0], requests)
    return Scenario(
        scaling.within(options.pods) if scaling else options.pods,
        model,
        options.routers,
        _window(options.redis_away, requests),
        classes=classes,
        has_bounds=bool(options.classes),
        autoscale=scaling,
    )


def _scaling(options: SimulateOptions, one: ServiceClass, requests: list[Request]) -> Scaling | None:
    """Return bounds and target of the autoscaler. Its target is the bound of a request with the mean number of uncached tokens."""
    if options.autoscale is None:
        return None
    least, _, most = options.autoscale.partition(":")
    target = one.ttft + one.ttft_per_token * necessary_tokens(requests) / max(1, len(requests))
    if not math.isfinite(target):
        raise UserError(f"--autoscale {options.autoscale}: class {one.name} has no bound of TTFT: give its A and B as seconds")
    try:
        bounds = {"minReplicas": int(least), "maxReplicas": int(most)}
    except ValueError:
        raise UserError(f"--autoscale {options.autoscale}: give MIN:MAX, as 1:20") from None
    try:
        return Scaling.model_validate(
            {
                **bounds,
                "target": {"ttftMilliseconds": max(1, round(1000 * target))},
                "scaleDown": {"stabilizationWindowSeconds": options.stabilization_seconds},
            }
        )
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise UserError(
            f"--autoscale {options.autoscale}: {where}{': ' if where else ''}{first['msg'].removeprefix('Value error, ')}"
        ) from None


def _check(options: SimulateOptions) -> None:
    for flag in ("pods", "speed", "prefill_rate", "cache_blocks", "chunk_tokens", "step_seconds", "routers", "repeats"):
        if not 0 < getattr(options, flag) < math.inf:  # written so that nan is refused too
            raise UserError(f"--{flag.replace('_', '-')} {getattr(options, flag)}: must be above 0 and finite")
    if options.speed < LEAST_SPEED:
        raise UserError(f"--speed {options.speed}: must be at least {LEAST_SPEED}")
    if options.pods > MOST_PODS:
        raise UserError(f"--pods {options.pods}: must be at most {MOST_PODS}")
    for flag in ("context_seconds", "start_seconds", "report_seconds", "stabilization_seconds"):
        if not 0 <= getattr(options, flag) < math.inf:
            raise UserError(f"--{flag.replace('_', '-')} {getattr(options, flag)}: must be finite and not below 0")
    if options.num_prompts is not None and options.num_prompts < 1:
        raise UserError(f"--num-prompts {options.num_prompts}: must be at least 1")
    if options.seconds is not None and not 0 < options.seconds <= MOST_SECONDS:
        raise UserError(f"--seconds {options.seconds}: must be above 0 and at most {MOST_SECONDS}")
    if options.seconds is not None and options.num_prompts is not None:
        raise UserError("--seconds and --num-prompts exclude each other: give one of them")
    if options.step_seconds * options.prefill_rate >= options.chunk_tokens:
        raise UserError(
            f"--step-seconds {options.step_seconds}: must be below --chunk-tokens / --prefill-rate, the "
            f"{options.chunk_tokens / options.prefill_rate:g} s of a step with prompt tokens"
        )
    names = [parse_class(text).name for text in options.classes or []]
    if repeated := {name for name in names if names.count(name) > 1}:
        raise UserError(f"--class: {', '.join(sorted(repeated))} is given twice; give each class its own name")
    _scaling(options, parse_class(options.classes[0]) if options.classes else DEFAULT_CLASSES[0], [])
    _window(options.redis_away, [])
    _ = options.speeds, options.policies  # they raise UserError
    if options.json:
        try:  # before minutes of replay are lost
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.open("a").close()
        except OSError as error:
            raise UserError(f"--json {options.json}: cannot be written ({error.strerror})") from None


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


def _record(options: SimulateOptions, cells: list[Cell]) -> dict[str, Any]:
    parameters = {name: value for name, value in vars(options).items() if isinstance(value, int | float | str | list)}

    def policies(cell: Cell) -> dict[str, Any]:
        return {
            policy: {"mean": average(outcomes), "runs": [each.figures() for each in outcomes]} for policy, outcomes in cell.runs.items()
        }

    record = {"workload": Path(options.workload).name, "parameters": parameters}
    if options.sweep:
        return record | {"sweep": [{"speed": cell.speed, "load": cell.load, "policies": policies(cell)} for cell in cells]}
    return record | {"policies": policies(cells[0])}
