"""Random interleavings of arrivals, steps, aborts and evictions: no access to memory depends on the speed of a stream."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.worker.cuda.engine import PROMPTS, device_engine

ACTIONS = st.lists(
    st.one_of(
        st.integers(0, len(PROMPTS) - 1).map(lambda prompt: ("submit", prompt)),
        st.integers(1, 5).map(lambda steps: ("step", steps)),
        st.integers(0, 9).map(lambda number: ("abort", number)),
        st.just(("clear", 0)),
    ),
    min_size=6,
    max_size=24,
)


BEFORE = [each for prompt in (5, 1, 3, 5, 1) for each in (("submit", prompt), ("step", 40))]
AFTER = [each for prompt in (3, 5, 1) for each in (("submit", prompt), ("step", 40))]


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
def test_no_access_depends_on_the_speed_of_a_stream(graphs: bool, expected: list[list[int]]) -> None:
    """Requests that are not aborted get their tokens, with prefixes that move to the host and back on the way."""
    loads = aborts = replays = 0

    @settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), database=None)
    @given(ACTIONS)
    def run(actions: list[tuple[str, int]]) -> None:
        nonlocal loads, aborts, replays
        with device_engine(graphs=graphs) as (engine, mode):
            # Longer than the device's pages, one after the other, so that each example evicts prefixes and loads them again.
            for action, value in [*BEFORE, ("submit", 3), *actions, *AFTER]:
                if action == "submit":
                    engine.submit(value)
                elif action == "abort":
                    engine.abort(value)
                elif action == "clear":
                    engine.cache.clear()
                else:
                    for _ in range(value):
                        engine.step()
            engine.finish()
            assert mode.machine.faults == []
            for name, tokens in engine.answers().items():
                assert tokens == expected[engine.prompts[name]], name
            host = engine.scheduler.load().host
            assert host is not None
            loads, replays = loads + host.loaded, replays + mode.machine.replays
            aborts += len(engine.prompts) - len(engine.answers())
            assert mode.pageable == 0, "a copy of pageable memory waits for the device"

    run()
    assert loads > 10 and aborts > 5 and (replays > 30) == graphs, (loads, aborts, replays)
