"""The static fleet that an autoscaled one is compared with."""

from dataclasses import replace

from fairlead.simulate.outcome import Outcome
from fairlead.simulate.replay import Scenario, replay
from fairlead.simulate.workloads.request import Request

SHARE = 0.99
"""Of the static fleet's goodput, which the autoscaled one must have."""


def find_static_fleet(autoscaled: Outcome, requests: list[Request], scenario: Scenario, seed: int) -> Outcome:
    """Return the outcome of the largest fleet of constant size of whose goodput the autoscaled one has at least SHARE."""
    assert scenario.autoscale is not None, "the outcome is of an autoscaled fleet"
    least, most = 1, scenario.autoscale.max_replicas

    def run(pods: int) -> Outcome:
        return replay(autoscaled.policy, requests, replace(scenario, pods=pods, autoscale=None), seed)

    best = run(least)
    while least < most:  # more pods serve more requests in time
        middle = (least + most + 1) // 2
        outcome = run(middle)
        if SHARE * outcome.met() <= autoscaled.met():
            least, best = middle, outcome
        else:
            most = middle - 1
    return best
