"""The engine's metrics, the measured pace of prefill, and the prompt format from files."""

import json
from pathlib import Path

import pytest
from tests.agent.stand_in_engine import METRICS, write_model

from fairlead_agent.engine.metrics import add_own_names, read_stats
from fairlead_agent.engine.pace import PrefillPace
from fairlead_agent.engine.tokenizer import NoFormat, find_folder, read_format

SGLANG = b"""# HELP sglang:num_running_reqs Running.
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{model_name="m",tp_rank="0"} 2.0
# HELP sglang:num_queue_reqs Queued.
# TYPE sglang:num_queue_reqs gauge
sglang:num_queue_reqs{model_name="m",tp_rank="0"} 1.0
# HELP sglang:cached_tokens_total Cached.
# TYPE sglang:cached_tokens_total counter
sglang:cached_tokens_total{model_name="m"} 64.0
"""


def test_stats_of_vllm_sum_its_engine_cores() -> None:
    text = METRICS.format(running=2, prompt=100, cached=40, block=16, blocks=50)
    text += 'vllm:num_requests_running{engine="1",model_name="stand-in"} 3.0\nvllm:broken{engine="1"} not-a-number\n'
    text += 'vllm:num_requests_waiting{engine="1"} NaN\nvllm:kv_cache_usage_perc{engine="1"} +Inf\n'
    stats = read_stats(text.encode(), "vllm")
    assert (stats.running, stats.waiting, stats.prompt_tokens, stats.cached_tokens) == (5, 3, 100, 40)
    assert (stats.block_size, stats.blocks, stats.kv_usage) == (16, 50, 0.25)


def test_stats_of_sglang_and_its_families_under_our_names() -> None:
    stats = read_stats(SGLANG, "sglang")
    assert (stats.running, stats.waiting, stats.cached_tokens) == (2, 1, 64)
    text = add_own_names(SGLANG, "sglang")
    assert text.startswith(SGLANG)
    assert b'fairlead_num_requests_waiting{model_name="m",tp_rank="0"} 1.0' in text
    assert b"# TYPE fairlead_prefix_cache_hits_total counter" in text


def measure(pace: PrefillPace, steps: list[list[int]], slower: float = 1.0) -> float:
    """Compute the prompts of each step at 5,000 tokens/s and 40 ms besides, and return the pace."""
    now = 0.0
    for tokens in steps:
        for _ in tokens:
            pace.begin(now)
        now += 0.04 + slower * sum(tokens) / 5000
        for number, each in enumerate(tokens):
            pace.end(now + 0.0001 * number, each)
        now += 1  # idle time does not count
    return pace.tokens_per_second


def test_concurrent_prompts_do_not_count_their_time_twice() -> None:
    pace = PrefillPace()
    assert pace.tokens_per_second == 0
    for _ in range(5):
        pace.begin(10.0)
    for at in (10.3, 10.6, 10.9, 11.2, 11.5):
        pace.end(at, 300)
    assert pace.tokens_per_second == pytest.approx(1000)
    assert measure(PrefillPace(), [[400, 800]] * 3) == pytest.approx(1200 / 0.28, rel=0.01), "a step is one measurement"


def test_short_prompts_do_not_make_an_engine_seem_slow() -> None:
    """Routers would send it no long prompt any more, and it would never be measured again."""
    assert measure(PrefillPace(), [[30]] * 100) == 0, "unknown: what they take is not computing"
    pace = PrefillPace()
    known = measure(pace, [[1200]] * 3)
    assert known == measure(pace, [[100]] * 100) == pytest.approx(1200 / 0.28)


def test_an_engine_that_gets_only_short_prompts_keeps_its_pace() -> None:
    pace = PrefillPace()
    long = measure(pace, [[1200]] * 3)
    assert measure(pace, [[200]] * 50) == long, "another engine, which gets the long prompts, would seem twice as fast"


def test_one_huge_prompt_does_not_keep_the_pace_for_ever() -> None:
    pace = PrefillPace()
    before = measure(pace, [[50_000]])
    assert measure(pace, [[1200]] * 400, slower=8.0) < before / 4


def test_other_work_on_the_machine_does_not_change_the_pace() -> None:
    pace = PrefillPace()
    measure(pace, [[1200]] * 6)
    assert measure(pace, [[1200]] * 3, slower=8.0) == pytest.approx(1200 / 0.28)
    assert measure(pace, [[1200]] * 32, slower=8.0) == pytest.approx(1200 / 1.96, rel=0.01), "a slower engine is noticed"


def test_equal_engines_have_equal_paces() -> None:
    """One computes single prompts, the other also batches in which other work slows it down."""
    single = measure(PrefillPace(), [[1200]] * 20)
    pace = PrefillPace()
    measure(pace, [[1200]] * 8)
    for _ in range(6):
        measure(pace, [[1200] * 4], slower=3.0)
        mixed = measure(pace, [[1200]] * 2)
    assert mixed == pytest.approx(single, rel=0.05)


@pytest.mark.parametrize("unknown", [0, 8])
def test_a_busy_engine_is_measured_too(unknown: int) -> None:
    """It is never idle. `unknown`: the tokens of one of so many prompts are unknown."""
    pace, now, sent = PrefillPace(), 0.0, 0
    for _ in range(4):
        pace.begin(now)
    for _ in range(100):  # steps of four prompts
        for _ in range(4):
            pace.begin(now)
        now += 1.0
        for number in range(4):
            sent += 1
            pace.end(now + 0.001 * number, 0 if unknown and sent % unknown == 0 else 600 + 400 * number)
    assert pace.tokens_per_second == pytest.approx(4800, rel=0.02), "no period ends within a step"


def test_blocks_that_the_agent_did_not_know_of_change_nothing() -> None:
    pace, now = PrefillPace(), 0.0
    for number in range(64):
        pace.begin(now)
        now += 0.02 if number % 8 == 7 else 0.24  # the engine had its blocks
        pace.end(now, 1200)
        now += 1.0
    assert pace.tokens_per_second == pytest.approx(5000)


def test_unknown_prompts_do_not_count() -> None:
    pace = PrefillPace()
    known = measure(pace, [[1200]] * 4)
    pace.begin(100.0)
    pace.end(105.0, 0)
    assert measure(pace, [[1200]]) == pytest.approx(known)


def test_runtimes_of_one_model_have_separate_roots(tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    ours, theirs = (read_format(folder, runtime, ["m"], 16, 64, "") for runtime in ("vllm", "sglang"))
    assert ours.tokenizer_digest == theirs.tokenizer_digest
    assert ours.model_digest != theirs.model_digest


def test_templates_and_special_tokens_of_older_files(tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    (folder / "chat_template.jinja").unlink()
    named = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    config = {"chat_template": named, "eos_token": {"content": "</s>"}, "bos_token": None}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    format = read_format(folder, "vllm", ["m"], 16, 64, "")
    assert (format.chat_template, format.tool_template, format.special_tokens) == ("a", "b", {"eos_token": "</s>"})


def test_files_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    with pytest.raises(NoFormat, match="mount the engine's model into the agent's container too"):
        find_folder("/nowhere/model")
    with pytest.raises(NoFormat, match=r"has no tokenizer\.json"):
        read_format(tmp_path, "vllm", ["m"], 16, 64, "")
    write_model(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[")
    with pytest.raises(NoFormat, match=r"tokenizer_config\.json is not a JSON object"):
        read_format(tmp_path, "vllm", ["m"], 16, 64, "")
