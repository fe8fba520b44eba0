"""One promise of the scheduler a test."""

import random
from array import array

import pytest
from tests.worker.scheduler.engine_model import EOS, EngineModel, kv, next_token, reference, root_value


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(100, 1000), k=length)


def rows(machine: EngineModel, step: int = -1) -> dict[str, tuple[int, int]]:
    return {name: (start, count) for name, start, count in machine.plans[step]}


def finish(machine: EngineModel) -> None:
    machine.run()
    machine.check_answers()


# Chunked prefill


@pytest.mark.parametrize("length", [1, 63, 64, 65, 128, 1000])
def test_a_prompt_of_l_tokens_takes_l_by_c_steps(length: int) -> None:
    machine = EngineModel(128, 16, chunked_prefill_size=64)
    machine.submit(prompt(length), 1)
    finish(machine)
    assert len(machine.plans) == -(-length // 64)


def test_a_prompt_progresses_by_an_eighth_of_a_chunk_beside_as_many_decodes() -> None:
    machine = EngineModel(8192, 16, chunked_prefill_size=256, max_num_seqs=300)
    for seed in range(256):
        machine.submit(prompt(1 + seed % 8, seed), 200, ignore_eos=True)
    while len(machine.scheduler.batch.requests) < 256:
        machine.step()
    long = machine.submit(prompt(1024, 3), 1)
    before = len(machine.plans)
    while machine.told[long].finish is None:
        machine.step()
    assert len(machine.plans) - before == 1024 // (256 // 8)


def test_chunks_are_cut_at_pages_and_the_chunked_request_goes_on_first() -> None:
    machine = EngineModel(64, 16, chunked_prefill_size=40)
    long = machine.submit(prompt(110))
    short = machine.submit(prompt(10, 1))
    machine.step()
    assert rows(machine) == {long: (0, 32)}, "40 tokens cut down to two whole pages; no second request is cut"
    assert machine.scheduler.prefill.chunked_req.id == long
    machine.step()
    machine.step()
    assert rows(machine) == {long: (64, 32)}
    machine.step()
    assert rows(machine) == {long: (96, 14), short: (0, 10)} and machine.scheduler.prefill.chunked_req is None
    finish(machine)


def test_chunking_off_computes_prompts_whole() -> None:
    machine = EngineModel(64, 16, chunked_prefill_size=0, max_prefill_tokens=128, policy="fcfs")
    sizes = {machine.submit(prompt(length, length)): length for length in (60, 60 + 1, 300, 20)}
    first, second, big, last = sizes
    machine.step()
    assert rows(machine) == {first: (0, 60), second: (0, 61)}
    machine.step()
    assert rows(machine)[big] == (0, 300), "longer than a step may be: it has the prefill of one step to itself"
    assert last not in rows(machine)
    finish(machine)


def test_decodes_reduce_the_prefill_budget_to_a_page_at_least() -> None:
    machine = EngineModel(1024, 4, chunked_prefill_size=16, dedupe_tokens=1000)
    decoding = [machine.submit(prompt(1, seed), 60, ignore_eos=True) for seed in range(10)]
    machine.step()
    late = machine.submit(prompt(40, 99))
    machine.step()
    assert rows(machine)[late] == (0, 4), "16 less 10 decodes, in whole pages"
    more = [machine.submit(prompt(1, 50 + seed), 60, ignore_eos=True) for seed in range(20)]
    while machine.scheduler.load().waiting:
        machine.step()
    last = machine.submit(prompt(40, 77))
    machine.step()
    assert len(machine.scheduler.running) == len(decoding + more) + 1, "more decodes than the chunk has tokens"
    assert rows(machine)[last] == (0, 4), "and a prompt still gets on"
    finish(machine)


def test_decodes_are_in_every_step() -> None:
    machine = EngineModel(512, 16, chunked_prefill_size=64)
    decoding = [machine.submit(prompt(5, seed), 40, ignore_eos=True) for seed in range(8)]
    machine.step()
    machine.submit(prompt(2000, 9), 4)
    for _ in range(30):
        machine.step()
        assert set(decoding) <= set(rows(machine)), "no decode waits for a prompt"
    finish(machine)


def test_without_mixing_a_step_is_prefill_or_decodes_and_prefill_goes_first() -> None:
    machine = EngineModel(512, 16, chunked_prefill_size=64, enable_mixed_chunk=False)
    decoding = [machine.submit(prompt(5, seed), 9, ignore_eos=True) for seed in range(3)]
    machine.step()
    long = machine.submit(prompt(160, 9), 4, ignore_eos=True)
    steps = []
    for _ in range(4):
        machine.step()
        machine.check()
        steps.append(set(rows(machine)))
    assert steps == [{long}, {long}, {long}, {*decoding, long}], "whole chunks, and the decodes wait"
    finish(machine)


# Memory


def test_a_whole_prompt_is_reserved_at_admission() -> None:
    machine = EngineModel(10, 4, chunked_prefill_size=4)
    machine.submit(prompt(32), 1)
    machine.submit(prompt(12, 1), 1)
    machine.step()
    assert machine.cache.pool.free == 2 and machine.scheduler.load().waiting == 1, "8 pages are the first one's, computed or not"
    finish(machine)


def test_a_request_that_can_never_fit_is_refused_with_the_numbers() -> None:
    machine = EngineModel(8, 4, max_model_len=100)
    big = machine.submit(prompt(20), 14)
    told = machine.told[big]
    assert told.finish == "error"
    assert all(number in told.error for number in ("20 tokens", "up to 14", "9 KV pages", "has 8", "32 tokens")), told.error
    fits = machine.submit(prompt(20), 13, ignore_eos=True)
    assert machine.told[fits].finish is None
    too_long = machine.submit(prompt(100))
    assert "100 tokens" in machine.told[too_long].error
    for name, tokens, arguments in (("e", [], {}), ("m", [1], {"max_tokens": 0})):
        assert machine.told[machine.submit(tokens, name=name, **arguments)].finish == "error"
    machine.told.pop("m")
    finish(machine)
    assert len(machine.told[fits].tokens) == 13 and machine.scheduler.stats.preemptions == 0


def test_preemption_takes_the_cheapest_request_never_the_oldest_and_requeues_it_first() -> None:
    machine = EngineModel(12, 4, policy="fcfs", initial_new_token_ratio=0.0, dedupe_tokens=1000)
    oldest = machine.submit(prompt(3, 1), 30, ignore_eos=True)
    dear = machine.submit(prompt(20, 2), 20, ignore_eos=True)
    cheap = machine.submit(prompt(11, 3), 20, ignore_eos=True)
    waiting = machine.submit(prompt(16, 4), 20, ignore_eos=True)
    preempted = []
    while not preempted:
        machine.step()
        machine.check()
        preempted = [request.id for request in machine.scheduler.waiting._requests.values() if request.history.lost_pages]
    assert preempted == [cheap], "11 tokens and its output cost less than 20; the oldest would be cheaper still"
    assert {request.id for request in machine.scheduler.running} == {oldest, dear}
    assert machine.scheduler.reserve.ratio >= 0.1
    order: list[str] = []
    while len(order) < 2:
        machine.step()
        order += [name for name in rows(machine) if name in (cheap, waiting) and name not in order]
    assert order == [cheap, waiting], "back at the head of the queue"
    finish(machine)
    assert machine.told[cheap].cached_tokens == 0, "what it finds of its own KV is no prefix hit"


def test_the_new_token_ratio_decays_and_rises() -> None:
    machine = EngineModel(64, 4, new_token_ratio_decay_steps=10)
    machine.submit(prompt(4), 60, ignore_eos=True)
    machine.step()
    assert machine.scheduler.reserve.ratio == 0.7
    for _ in range(20):
        machine.step()
    assert abs(machine.scheduler.reserve.ratio - 0.1) < 1e-9
    machine.scheduler.reserve.raise_ratio(machine.scheduler.running)
    assert machine.scheduler.reserve.ratio > 0.1
    finish(machine)


def test_output_is_reserved_by_the_ratio() -> None:
    sure = EngineModel(16, 4, initial_new_token_ratio=1.0)
    bold = EngineModel(16, 4, initial_new_token_ratio=0.0)
    for machine in (sure, bold):
        for seed in range(3):
            machine.submit(prompt(4, seed), 28, ignore_eos=True)
        machine.step()
        machine.run()
        machine.check_answers()
    assert sure.scheduler.stats.preemptions == 0 and bold.scheduler.stats.preemptions > 0


# Prefix reuse


def test_a_common_prefix_in_flight_is_computed_once() -> None:
    common = prompt(256)
    machine = EngineModel(512, 16, chunked_prefill_size=64)
    names = [machine.submit(common + prompt(8, seed), 2) for seed in range(64)]
    finish(machine)
    computed = [0] * 256
    for plan in machine.plans:
        for _, start, count in plan:
            for position in range(start, min(start + count, 256)):
                computed[position] += 1
    assert computed == [1] * 256
    assert sorted(machine.told[name].cached_tokens for name in names) == [0] + [256] * 63


def test_sharing_requests_continue_from_an_aborted_prefill() -> None:
    common = prompt(200)
    machine = EngineModel(64, 16, chunked_prefill_size=32)
    leader, follower = machine.submit([*common, 1]), machine.submit([*common, 2])
    machine.step()
    machine.step()
    assert follower not in rows(machine)
    machine.abort(leader)
    machine.step()
    assert rows(machine) == {follower: (64, 32)}, "from where the leader came to"
    finish(machine)


def test_cached_tokens_are_reported_from_the_first_output_on() -> None:
    machine = EngineModel(64, 16)
    cold = machine.submit(prompt(50))
    machine.run()
    warm = machine.submit([*prompt(50)[:40], 5])
    machine.step()
    assert (machine.told[cold].cached_tokens, machine.told[warm].cached_tokens) == (0, 32)
    full = machine.submit(prompt(48))
    finish(machine)
    assert machine.told[full].cached_tokens == 32, "the last page is computed again: its last token gives the logits"


def test_output_pages_are_reused_by_the_next_turn() -> None:
    machine = EngineModel(64, 4)
    first = machine.submit(prompt(10), 20, ignore_eos=True)
    machine.run()
    turn = machine.submit([*prompt(10), *machine.told[first].tokens, 5, 6])
    finish(machine)
    assert machine.told[turn].cached_tokens == 28, "all but the last token of the answer was computed: 29, in whole pages"


# Order


def test_lpm_admits_the_longest_prefix_first_fcfs_the_first() -> None:
    for policy, expected in (("lpm", ["deep", "shallow", "none"]), ("fcfs", ["none", "shallow", "deep"])):
        machine = EngineModel(256, 16, policy=policy, max_num_seqs=1)
        machine.submit(prompt(160))
        machine.run()
        machine.submit(prompt(8, 1), 3, name="busy", ignore_eos=True)
        machine.step()
        machine.submit(prompt(160, 5), name="none")
        machine.submit([*prompt(160)[:32], *prompt(20, 6)], name="shallow")
        machine.submit([*prompt(160)[:128], *prompt(20, 7)], name="deep")
        seen: list[str] = []
        while not machine.scheduler.idle:
            machine.step()
            seen += [name for name in rows(machine) if name not in (*seen, "busy")]
        assert seen == expected


def test_a_large_request_is_bypassed_a_bounded_number_of_times() -> None:
    machine = EngineModel(16, 4, policy="fcfs", max_bypass=3, dedupe_tokens=1000)
    machine.submit(prompt(4, 1), 25, ignore_eos=True)
    machine.step()
    machine.submit(prompt(60, 2), 1, name="large")
    for seed in range(30):
        machine.submit(prompt(4, 10 + seed), 4, ignore_eos=True)
    while machine.told["large"].finish is None:
        machine.step()
        machine.check()
    ended = sum(told.finish is not None for told in machine.told.values())
    assert ended == 2 + 3, "the one before it, three that passed it, and itself"
    finish(machine)


# Finish


def test_every_way_to_finish() -> None:
    base = prompt(9)
    values = reference_tokens(base, 30)
    machine = EngineModel(64, 4, max_model_len=30)
    plain = machine.submit(base, 6, ignore_eos=True)
    stopped = machine.submit(base, 15, ignore_eos=True, stop_token_ids=(values[3],))
    later = machine.submit(base, 15, ignore_eos=True, stop_token_ids=(values[3],), min_tokens=values.index(values[3]) + 2)
    longest = machine.submit(base, 500, ignore_eos=True)
    finish(machine)
    assert (len(machine.told[plain].tokens), machine.told[plain].finish) == (6, "length")
    assert machine.told[stopped].tokens == values[: values.index(values[3]) + 1] and machine.told[stopped].finish == "stop"
    assert len(machine.told[later].tokens) > len(machine.told[stopped].tokens), "no stop before min_tokens"
    assert (len(machine.told[longest].tokens), machine.told[longest].finish) == (21, "length"), "max_model_len"


def reference_tokens(base: list[int], count: int) -> list[int]:
    known = array("I", base)
    for _ in range(count):
        known.append(next_token(kv(root_value(1, False), known)[-1]))
    return list(known[len(base) :])


def test_eos_ends_a_request_unless_ignored() -> None:
    seed = next(s for s in range(1000) if EOS in reference_tokens(prompt(5, s), 10))
    machine = EngineModel(64, 4)
    ends = machine.submit(prompt(5, seed), 20)
    goes_on = machine.submit(prompt(5, seed), 20, ignore_eos=True)
    finish(machine)
    assert machine.told[ends].finish == "stop" and machine.told[ends].tokens[-1] == EOS
    assert machine.told[goes_on].finish == "length"
    assert reference(machine.told[ends].submit, 1 << 20)[1] == "stop"


# Abort


def test_abort_from_every_state_gives_the_pages_back() -> None:
    def machine_in(state: str) -> EngineModel:
        machine = EngineModel(16, 4, chunked_prefill_size=8, initial_new_token_ratio=0.0, dedupe_tokens=1000)
        if state == "waiting":
            machine.submit(prompt(20), 20, name="x", ignore_eos=True)
        elif state == "chunked":
            machine.submit(prompt(20), 20, name="x", ignore_eos=True)
            machine.step()
            assert machine.scheduler.prefill.chunked_req is not None
        elif state == "decoding":
            machine.submit(prompt(5), 20, name="x", ignore_eos=True)
            machine.step()
            machine.step()
        elif state == "preempted":
            machine.submit(prompt(20), 40, ignore_eos=True)
            machine.submit(prompt(20, 1), 40, name="x", ignore_eos=True)
            while not machine.scheduler.stats.preemptions:
                machine.step()
        return machine

    for state in ("waiting", "chunked", "decoding", "preempted"):
        for in_flight in (False, True):
            machine = machine_in(state)
            if in_flight:
                machine.step(abort_in_flight="x")
            else:
                machine.abort("x")
            machine.check()
            assert machine.told["x"].finish == "abort", state
            machine.run()
            assert machine.cache.available == machine.cache.pool.total, state
    machine.abort("x")
    machine.abort("unknown")


def test_an_id_in_use_is_refused() -> None:
    machine = EngineModel(16, 4)
    machine.submit(prompt(5), name="same")
    answer = machine.scheduler.submit(machine.told["same"].submit)
    assert answer is not None and answer.finish == "error" and "same" in answer.error
    finish(machine)


def test_load_counts() -> None:
    machine = EngineModel(64, 4, chunked_prefill_size=16)
    machine.submit(prompt(40), 3, ignore_eos=True)
    machine.submit(prompt(30, 1), 3, ignore_eos=True)
    assert machine.scheduler.load().backlog_tokens == 70
    machine.step()
    assert machine.scheduler.load().backlog_tokens == 54 and machine.scheduler.load().prefill_rate == 1600
    finish(machine)
    load = machine.scheduler.load()
    assert (load.prompt_tokens, load.cached_tokens, load.output_tokens, load.backlog_tokens) == (70, 0, 6, 0)
    assert abs(load.step_seconds - 0.01) < 1e-9 and load.pages_free == 64 and load.pages_cached > 0


@pytest.mark.parametrize("preempted", [False, True])
def test_an_aborted_request_tells_what_was_computed_for_it(preempted: bool) -> None:
    """Without cached tokens, nothing twice, and nothing for one that waits."""
    machine = EngineModel(128, 16, chunked_prefill_size=64, max_num_seqs=1)
    shared = prompt(320)
    machine.submit(shared, 1)
    finish(machine)
    running, waiting = machine.submit(shared + prompt(640, 1)), machine.submit(prompt(64, 2))
    machine.step()
    machine.step()
    if preempted:
        request = machine.scheduler._requests[running]
        machine.scheduler.preempt(request)
        machine.scheduler.waiting.add(request)
    told = [machine.scheduler.abort(name) for name in (running, waiting)]
    assert [output.computed_tokens for output in told if output is not None] == [128, 0]
