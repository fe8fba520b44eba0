"""Our histogram is scraped like the library's, and an observation costs less."""

import pytest
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from fairlead_common.histogram import PlainHistogram

BOUNDS = (0.001, 0.0025, 0.3, 5, 80, 65_536, 2_000_000)


def scraped(registry: CollectorRegistry) -> list[str]:
    return [line for line in generate_latest(registry).decode().splitlines() if "_created{" not in line and "_created " not in line]


@pytest.mark.parametrize("label_sets", [({},), ({"model_name": "m", "kind": "decode"}, {"model_name": "m", "kind": "mixed"})])
def test_the_plain_histogram_is_scraped_as_the_librarys(label_sets: tuple[dict[str, str], ...]) -> None:
    plain, ours = CollectorRegistry(), CollectorRegistry()
    library = Histogram("gap_seconds", "Between outputs.", tuple(label_sets[0]), buckets=BOUNDS, registry=plain)
    histogram = PlainHistogram("gap_seconds", "Between outputs.", BOUNDS, ours)
    for labels in label_sets:
        series, theirs = histogram.labels(**labels), library.labels(**labels) if labels else library
        for value in (0.0, 0.001, 0.0011, 0.3, 79.9, 80.0, 80.1, 1e6, 1e7):
            theirs.observe(value)
            series.observe(value)
    assert scraped(ours) == scraped(plain)
