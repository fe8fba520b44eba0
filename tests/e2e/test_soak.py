"""`make soak` applies each kind of fault, and measures memory after the warm-up."""

import random

import pytest
from e2e.soak.faults import OF_MEASURED, OF_OTHERS, plan
from e2e.soak.memory import PERIOD, WARM_UP, slope


def test_faults_of_measured_processes_come_first_and_every_kind_comes() -> None:
    planned = plan(30, OF_OTHERS, random.Random(1))
    assert len(planned) == 30
    assert set(planned[:10]) == set(OF_MEASURED) and set(planned[10:]) == set(OF_OTHERS)
    assert planned == plan(30, OF_OTHERS, random.Random(1)), "the same seed gives the same run"


def test_growth_while_a_process_warms_up_is_left_out() -> None:
    samples = [(at, 100 + at if at < WARM_UP else 160 + at / 360) for at in (PERIOD * number for number in range(60))]
    assert slope(samples) == pytest.approx(10.0), "10 MB an hour"
    assert slope(samples[:20]) is None, "too few samples"
