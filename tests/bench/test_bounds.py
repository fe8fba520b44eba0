"""The bounds that no routing can be better than."""

import pytest
from bench.router.bounds import pooled_bound


def test_the_pooled_bound_is_the_backlog_of_all_pods_without_the_requests_that_may_be_late() -> None:
    times, works = [0.0, 0.0, 0.0, 10.0], [4.0, 4.0, 4.0, 1.0]
    assert pooled_bound(times, works, pods=2, late=0.0) == pytest.approx(6.0)
    assert pooled_bound(times, works, pods=2, late=0.25) == pytest.approx(4.0), "one may be late"
    assert pooled_bound([0.0, 10.0], [4.0, 4.0], pods=2, late=0.0) == pytest.approx(2.0)
