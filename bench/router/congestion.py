"""What each part of the answer to congestion is worth: the simulator with one of them switched off.

The parts are the score's price of congestion, its weight of streams, promises of waiting requests to the index, and the orders of queues.
Other routers' policies in front of the same pods show what the score is worth. Only this benchmark switches parts off, in the modules
that it imports.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from bench.common.report import make_parser, write_report
from fairlead.simulate import queues
from fairlead.simulate.catalog import GENERATORS, load, offered_load
from fairlead.simulate.pods import PodModel
from fairlead.simulate.policies import POLICIES
from fairlead.simulate.replay import Scenario, replay
from fairlead.simulate.report import average
from fairlead_index import score
from fairlead_router.serving.fair_queue import _Line
from fairlead_worker.scheduler.queue.waiting_queue import WaitingQueue

PODS = 16


@contextmanager
def _by_arrival() -> Iterator[None]:
    """Let pods and routers take requests in the order of arrival."""
    with patch.object(queues, "ORDER", "fcfs"), patch.object(_Line, "place", lambda line, item: (0.0, item.number)):
        yield


SWITCHES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "price": lambda: patch.object(score, "_price", lambda worker, work, least, congestion: 0.0),
    "streams": lambda: patch.object(score, "STREAM_WEIGHT", 0.0),
    "promises": lambda: patch.object(WaitingQueue, "promise", lambda queue: None),
    "order": _by_arrival,
}


VARIANTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "all parts": ("fairlead", ()),
    **{f"without {name}": ("fairlead", (name,)) for name in SWITCHES},
    "none of them": ("fairlead", tuple(SWITCHES)),
    **{f"{peer}, these pods": (peer, ()) for peer in ("llm-d-like", "sglang-like")},
}
"""Policy, and the parts that are off."""


def main() -> None:
    parser = make_parser(__name__, __doc__)
    parser.add_argument("--workload", default="zipf", help=f"{', '.join(GENERATORS)}, or a trace file (default: %(default)s)")
    parser.add_argument("--speeds", default="0.9,1.1", help="default: %(default)s")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--routers", type=int, default=1, help="several know loads that are 1 s old (default: %(default)s)")
    parser.add_argument("--num-prompts", type=int)
    options = parser.parse_args()
    model, results = PodModel(report_seconds=1.0) if options.routers > 1 else PodModel(), {}
    peers_here = {policy: replace(system, engine="fairlead") for policy, system in POLICIES.items() if system.is_peer}
    print(f"{'speed':>5} {'load':>5} {'variant':<24} {'hit rate':>8} {'mean s':>7} {'p99 s':>7}")
    for speed in map(float, options.speeds.split(",")):
        seeds = list(range(options.repeats))
        scenario = Scenario(PODS, model, routers=options.routers)
        played = load(options.workload, count=options.num_prompts, speed=speed, pods=PODS, model=model, seeds=seeds)
        for variant, (policy, off) in VARIANTS.items():
            with ExitStack() as stack:
                stack.enter_context(patch.dict(POLICIES, peers_here))
                for name in off:
                    stack.enter_context(SWITCHES[name]())
                figures = average([replay(policy, requests, scenario, seed) for seed, requests in zip(seeds, played, strict=True)])
            results[f"{speed:g} {variant}"] = figures
            numbers = f"{figures['hit_rate']:>8.1%} {figures['ttft_mean']:>7.2f} {figures['ttft_p99']:>7.2f}"
            print(f"{speed:>5g} {offered_load(played[0], PODS, model):>5.2f} {variant:<24} {numbers}", flush=True)
    write_report(__name__, options, results)
