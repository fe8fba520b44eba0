"""The options of `fairlead simulate`."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from fairlead.errors import UserError
from fairlead.simulate.catalog import GENERATORS
from fairlead.simulate.policies import POLICIES
from fairlead_operator.api.scaling import DEFAULT_STABILIZATION_WINDOW_SECONDS

LEAST_SPEED = 0.001
"""Of arrivals. Slower ones would take more simulated seconds than a run can count."""


@dataclass(frozen=True, kw_only=True)
class SimulateOptions:
    """The options of `fairlead simulate`."""

    workload: Annotated[
        str,
        typer.Option(
            "--workload",
            "--trace",
            metavar="NAME|FILE",
            help=f"{', '.join(GENERATORS)}, a Mooncake trace (JSON lines), or an Azure trace of 2023 (.csv). "
            "Traces: github.com/kvcache-ai/Mooncake, github.com/Azure/AzurePublicDataset.",
        ),
    ]
    pods: Annotated[int, typer.Option(metavar="N", help="Number of pods; with --autoscale at the start.")] = 16
    policy: Annotated[list[str], typer.Option(metavar="P", help=f"{', '.join(POLICIES)}; again for more.")] = field(default_factory=list)
    speed: Annotated[
        float, typer.Option(metavar="X", help="Replay X times as fast; generators: load, 1 is all that the pods can compute.")
    ] = 1.0
    sweep: Annotated[str | None, typer.Option(metavar="A,B,C", help="Several speeds, with the ratio to the best peer at each.")] = None
    routers: Annotated[int, typer.Option(metavar="N", help="Number of routers; each knows only its own requests and Redis.")] = 1
    repeats: Annotated[int, typer.Option(metavar="N", help="Runs of each policy, with other seeds, and start times of a trace.")] = 1
    classes: Annotated[
        list[str],
        typer.Option(
            "--class",
            metavar="NAME:SHARE:A:B:C",
            help="A share of the requests with TTFT <= A + B per 1,000 uncached tokens and ITL <= C seconds; again for more, the most "
            "urgent first. With it our routers refuse what they cannot serve in time (default all:1:2:0.5:0.1, which routers do not know).",
        ),
    ] = field(default_factory=list)
    start_seconds: Annotated[float, typer.Option(metavar="S", help="Seconds from a pod's creation until it is ready.")] = 60.0
    autoscale: Annotated[
        str | None,
        typer.Option(metavar="MIN:MAX", help="Let the operator's autoscaler set the number of pods, for the bounds of the first class."),
    ] = None
    stabilization_seconds: Annotated[
        int, typer.Option(metavar="S", help="Spec.scaling.scaleDown of --autoscale: pods go once fewer were enough for this long.")
    ] = DEFAULT_STABILIZATION_WINDOW_SECONDS
    redis_away: Annotated[
        str | None, typer.Option(metavar="A:B", help="Redis outage for the policy fairlead, as shares of the run, such as 0.25:0.75.")
    ] = None
    num_prompts: Annotated[int | None, typer.Option(metavar="N", help="Replay the first N requests (default all; generators: 6000).")] = (
        None
    )
    seconds: Annotated[
        float | None,
        typer.Option(metavar="S", help="Replay as many requests as arrive in S seconds, so that all speeds have the same span."),
    ] = None
    prefill_rate: Annotated[float, typer.Option(metavar="R", help="Prompt tokens per second of one pod.")] = 8000.0
    cache_blocks: Annotated[int, typer.Option(metavar="C", help="Cache size of one pod in blocks of 512 tokens.")] = 1500
    step_seconds: Annotated[float, typer.Option(metavar="S", help="Seconds of a step without prompt and context.")] = 0.01
    context_seconds: Annotated[
        float, typer.Option(metavar="S", help="Seconds that a step takes longer for each token of context of its decodes.")
    ] = 2.4e-08
    chunk_tokens: Annotated[int, typer.Option(metavar="N", help="Prompt tokens of a step.")] = 512
    report_seconds: Annotated[
        float, typer.Option(metavar="S", help="Seconds between two load reports of a worker (default 0.5; 0: always current).")
    ] = 0.5
    seed: Annotated[int, typer.Option(metavar="N")] = 0
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write all figures as JSON.")] = None

    @property
    def speeds(self) -> list[float]:
        """Return the speeds of `--sweep`, else the one of `--speed`. Raises UserError."""
        if self.sweep is None:
            return [self.speed]
        try:
            speeds = [float(part) for part in self.sweep.split(",")]
        except ValueError:
            speeds = []
        if not speeds or not all(LEAST_SPEED <= speed < math.inf for speed in speeds):
            raise UserError(f"--sweep {self.sweep}: every speed must be at least {LEAST_SPEED} and finite; give A,B,C")
        return speeds

    @property
    def policies(self) -> list[str]:
        """Return the policies to compare. Raises UserError."""
        for policy in self.policy:
            if policy not in (*POLICIES, "all"):
                raise UserError(f"--policy {policy}: must be one of {', '.join(POLICIES)} or all")
        return list(POLICIES) if not self.policy or "all" in self.policy else list(dict.fromkeys(self.policy))
