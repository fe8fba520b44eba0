"""The host tier under the scheduler: pages that the device has no room for come back on a hit, exactly, and are counted apart."""

from array import array

from tests.worker.scheduler.engine_model import EngineModel
from tests.worker.scheduler.test_scheduler import prompt

from fairlead_worker.ipc.messages import HostLoad


def finish(machine: EngineModel) -> None:
    machine.run()
    machine.check()
    machine.check_answers()


def host(machine: EngineModel) -> HostLoad:
    load = machine.scheduler.load().host
    assert load is not None
    return load


def machine_with_prefix_on_host(**config: object) -> EngineModel:
    """20 pages of 4 tokens, and 40 tokens of `prompt(40)` in the host tier."""
    machine = EngineModel(20, 4, host_slots=40, **config)
    machine.submit(prompt(41), 1)
    machine.run()
    machine.submit(prompt(79, 1), 1)
    machine.run()
    first = array("I", prompt(4)).tobytes()
    assert [node.page for node in machine.cache.nodes() if node.key == first] == [-1]
    return machine


def test_a_hit_on_the_host_is_a_hit_and_counted_apart() -> None:
    machine = machine_with_prefix_on_host()
    back = machine.submit([*prompt(40), 1, 2, 3], 5)
    plan = machine.step()
    assert len(plan.loads) == 10 and plan.prefill_tokens == 3, "loaded in the step that admits it; only the rest is computed"
    finish(machine)
    assert machine.told[back].cached_tokens == 40
    assert (host(machine).cached_tokens, host(machine).loaded, machine.scheduler.load().cached_tokens) == (40, 10, 40)
    again = machine.submit([*prompt(40), 4, 5], 1)
    finish(machine)
    assert machine.told[again].cached_tokens == 40
    assert (host(machine).cached_tokens, machine.scheduler.load().cached_tokens) == (40, 80), "that one was a hit on the device"


def test_without_a_host_tier_no_page_is_copied_or_reported() -> None:
    machine = EngineModel(20, 4)
    for seed in range(3):
        machine.submit(prompt(70, seed), 2)
        while not machine.scheduler.idle:
            plan = machine.step()
            assert not plan.saves and not plan.loads
    assert machine.scheduler.load().host is None and machine.scheduler.load().evicted_pages > 0


def test_requests_that_come_together_load_a_prefix_once() -> None:
    machine = machine_with_prefix_on_host()
    names = [machine.submit([*prompt(40), 30, seed], 3) for seed in range(3)]
    machine.step()
    finish(machine)
    assert [machine.told[name].cached_tokens for name in names] == [40] * 3
    assert (host(machine).loaded, host(machine).cached_tokens) == (10, 40)


def test_followers_of_a_prefix_that_begins_on_the_host_wait_for_the_rest() -> None:
    machine = machine_with_prefix_on_host(chunked_prefill_size=16)
    common = [*prompt(40), *prompt(32, 5)]
    pair = [machine.submit([*common, last], 1) for last in (1, 2)]
    finish(machine)
    assert [machine.told[name].cached_tokens for name in pair] == [40, 72]
    steps = [row for step in machine.plans for row in step if row[0] in pair]
    computed = [position for _, start, count in steps for position in range(start, start + count)]
    assert all(computed.count(position) <= 1 for position in range(40, 72)), "computed once, on top of what was loaded"


def test_a_preempted_request_finds_its_pages_on_the_host() -> None:
    recomputed = {}
    for slots in (0, 64):
        machine = EngineModel(16, 4, host_slots=slots, initial_new_token_ratio=0.0, dedupe_tokens=1000)
        for seed in range(3):
            machine.submit(prompt(16, seed), 40, ignore_eos=True)
        finish(machine)
        load = machine.scheduler.load()
        assert load.preemptions > 0
        recomputed[slots] = load.preemption_recomputed_tokens / load.preemptions
    assert recomputed[64] < 4 < recomputed[0], "less than a page: what had not filled one"


def test_a_prefix_on_the_host_is_admitted_only_where_the_device_has_room() -> None:
    machine = machine_with_prefix_on_host()
    machine.submit(prompt(44, 3), 20, name="running", ignore_eos=True)
    machine.step()
    machine.submit([*prompt(40), 1], 1, name="large")
    machine.step()
    assert machine.scheduler.load().waiting == 1, "10 pages on the host and one to compute do not fit beside 11 to 16"
    finish(machine)
    assert machine.told["large"].cached_tokens == 40


def test_lpm_counts_pages_on_the_host() -> None:
    machine = machine_with_prefix_on_host(max_num_seqs=1, policy="lpm")
    machine.submit(prompt(8, 4), 3, name="busy", ignore_eos=True)
    machine.step()
    machine.submit(prompt(20, 5), name="none")
    machine.submit([*prompt(40), 1], name="deep")
    order: list[str] = []
    while not machine.scheduler.idle:
        order += [row.request.id for row in machine.step().rows if row.request.id not in order]
    assert order == ["busy", "deep", "none"]
