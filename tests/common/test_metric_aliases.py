"""Metrics under other names: the same values, in a form that Prometheus' own parser reads."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from fairlead_common.metric_aliases import add_aliases


def test_a_family_is_exported_completely_under_each_alias() -> None:
    registry = CollectorRegistry()
    Counter("ours_tokens", "Tokens.", ["model"], registry=registry).labels("# HELP ours_size\n").inc(5)
    Gauge("ours_size", "ours_size, as a gauge", registry=registry).set(7)
    Histogram("ours_size_seconds", "Time.", buckets=(1, 2), registry=registry).observe(1.5)
    text = generate_latest(registry)
    aliased = add_aliases(text, {"ours_tokens_total": ["vllm:tokens_total"], "ours_size_seconds": ["vllm:a", "vllm:b"], "gone": ["x"]})
    assert aliased.startswith(text)
    families = {family.name: family for family in text_string_to_metric_families(aliased.decode())}
    assert families["vllm:tokens"].samples[0].labels == families["ours_tokens"].samples[0].labels
    assert families["vllm:tokens"].type == "counter" and families["vllm:tokens"].samples[0].value == 5
    for name in ("vllm:a", "vllm:b"):
        assert families[name].type == "histogram"
        expected = [(sample.name.removeprefix("ours_size_seconds"), sample.value) for sample in families["ours_size_seconds"].samples]
        assert [(sample.name.removeprefix(name), sample.value) for sample in families[name].samples] == expected
    assert "x" not in families and "vllm:size" not in families
