"""The fair queue: who goes next, how long a request is passed, what an estimate is worth, and who makes room."""

from collections.abc import Callable, Sequence

from hypothesis import given
from hypothesis import strategies as st

from fairlead_router.serving.fair_queue import FairQueue, QueuedRequest
from fairlead_router.tenancy.quota import Account
from fairlead_router.tenancy.tenants import Tenant


def new_account(served_tokens: float = 0.0) -> Account:
    account = Account(Tenant(), lambda: 1.0)
    account.served_tokens = served_tokens
    return account


class Waiting(QueuedRequest, eq=False):
    turn: int = 0
    """Tokens that have left the queue when everything that waited at its arrival may have left."""


def new_item(
    account: Account, number: int, priority: int = 0, size: int = 1, work: int = 10, had_turn: bool = False, turn: int = 0
) -> Waiting:
    return Waiting(account, priority, 10, size, work, number, had_turn, turn)


WORKS = st.integers(1, 1000)
ITEMS = st.lists(st.tuples(st.integers(0, 2), st.integers(-1, 1), WORKS, st.booleans()), min_size=1, max_size=30)
"""Tenant, priority, work, and whether it had its turn."""


def pop(queue: FairQueue[Waiting]) -> Waiting:
    item = queue.pop()
    assert item is not None
    return item


def pop_all(queue: FairQueue[Waiting]) -> list[Waiting]:
    """Pop all items; each is served as many tokens as it has to compute."""
    items = []
    while queue:
        items.append(pop(queue))
        items[-1].account.served_tokens += items[-1].work
    return items


def fill(entries: Sequence[tuple[int, int, int, bool]]) -> tuple[FairQueue[Waiting], list[Account], list[Waiting]]:
    queue, accounts = FairQueue[Waiting](), [new_account() for _ in range(3)]
    items = [new_item(accounts[tenant], n, priority, work=work, had_turn=turn) for n, (tenant, priority, work, turn) in enumerate(entries)]
    for item in items:
        queue.push(item)
    return queue, accounts, items


def test_tenants_alternate_and_higher_priority_goes_first() -> None:
    anna, boris, queue = new_account(), new_account(served_tokens=5), FairQueue[Waiting]()
    for number in range(6):
        queue.push(new_item(anna, number))
    for number in range(6, 9):
        queue.push(new_item(boris, number))
    queue.push(new_item(boris, 9, priority=-1))
    order = pop_all(queue)
    assert order[0].priority == -1
    assert [item.account is boris for item in order[1:7]] == [False, False, True, False, True, False]
    assert [item.number for item in order if item.account is anna] == list(range(6)), "equal work: first come, first served"


def test_the_least_work_of_a_tenant_goes_first() -> None:
    anna, queue = new_account(), FairQueue[Waiting]()
    for number, work in enumerate((500, 300, 20, 100)):
        queue.push(new_item(anna, number, work=work))
    assert [item.number for item in pop_all(queue)] == [0, 2, 1, 3], "100 tokens would delay three others by more than 300 of one"


def test_an_idle_tenant_saves_up_no_credit_and_a_requeued_item_goes_first() -> None:
    busy, rested, queue = new_account(served_tokens=1000), new_account(), FairQueue[Waiting]()
    items = [new_item(busy, number) for number in range(4)]
    for item in items:
        queue.push(item)
    for number in range(4, 8):
        queue.push(new_item(rested, number))
    first = pop(queue)
    assert first is items[0] and rested.served_tokens == 1000
    first.had_turn = True
    queue.push(first)
    assert queue.pop() is first


def test_an_item_that_may_not_go_keeps_its_place_and_blocks_no_other() -> None:
    anna, boris, queue = new_account(), new_account(served_tokens=5), FairQueue[Waiting]()
    items = [new_item(anna, 0, priority=-1), new_item(anna, 1), new_item(boris, 2), new_item(anna, 3)]
    for item in items:
        queue.push(item)
    may: Callable[[Waiting], bool] = lambda item: item.number > 1  # noqa: E731
    assert queue.pop(may) is items[3] and queue.pop(may) is items[2]
    assert queue.pop(may) is None and pop_all(queue) == items[:2]


@given(ITEMS)
def test_requeued_requests_go_before_the_others_of_their_tenant_by_arrival(entries: list[tuple[int, int, int, bool]]) -> None:
    queue, accounts, _ = fill(entries)
    order = pop_all(queue)
    for account in accounts:
        for priority in (-1, 0, 1):
            line = [item for item in order if item.account is account and item.priority == priority]
            requeued = [item.number for item in line if item.had_turn]
            assert [item.number for item in line[: len(requeued)]] == sorted(requeued)


@given(st.lists(st.one_of(WORKS, st.just("pop"), st.integers(-30, -1))))
def test_no_request_is_passed_by_one_that_arrives_after_its_turn_by_arrival(steps: list[int | str]) -> None:
    """A number is the work of a new request, a negative one the index of a request whose client goes away."""
    account, queue, inside, left = new_account(), FairQueue[Waiting](), list[Waiting](), 0
    arrived: dict[Waiting, int] = {}
    for number, step in enumerate([*steps, *["pop"] * len(steps)]):
        if isinstance(step, int) and step > 0:
            item = new_item(account, number, work=step, turn=left + sum(each.work for each in inside))
            arrived[item] = left
            inside.append(item)
            queue.push(item)
        elif inside:
            gone = pop(queue) if step == "pop" else inside[int(step) % len(inside)]
            queue.discard(gone)
            inside.remove(gone)
            left += gone.work
            if step == "pop":
                for waiting in inside:
                    assert gone.number < waiting.number or arrived[gone] < waiting.turn
    assert not queue


@given(st.lists(st.tuples(st.integers(0, 2), WORKS), min_size=3))
def test_tenants_that_wait_are_served_equally_but_for_one_request(entries: list[tuple[int, int]]) -> None:
    queue, accounts, items = fill([(tenant, 0, work, False) for tenant, work in entries])
    waiting = {account: sum(item.account is account for item in items) for account in accounts}
    while all(waiting.values()):
        item = pop(queue)
        waiting[item.account] -= 1
        item.account.served_tokens += item.work
        served = [account.served_tokens for account in accounts]
        assert max(served) - min(served) <= max(work for _, work in entries)


@given(ITEMS, st.integers(-1, 1), WORKS, st.booleans())
def test_the_work_ahead_of_a_tenant_alone_is_what_goes_before(
    entries: list[tuple[int, int, int, bool]], priority: int, work: int, had_turn: bool
) -> None:
    queue, accounts, _ = fill([(0, *rest) for _, *rest in entries])  # type: ignore[misc]
    newcomer = new_item(accounts[0], len(entries), priority, work=work, had_turn=had_turn)
    expected = queue.work_ahead(newcomer)
    queue.push(newcomer)
    order = pop_all(queue)
    assert expected == sum(item.work for item in order[: order.index(newcomer)])


@given(ITEMS, st.integers(-1, 1), WORKS)
def test_the_work_ahead_among_tenants_errs_by_one_request_of_each_other_tenant(
    entries: list[tuple[int, int, int, bool]], priority: int, work: int
) -> None:
    """With tenants that were served equally. `served_tokens` counts from the newcomer's class on, as more urgent ones all go first."""
    queue, accounts, items = fill(entries)
    newcomer = new_item(accounts[0], len(entries), priority, work=work)
    expected = queue.work_ahead(newcomer)
    queue.push(newcomer)
    ahead = 0
    while (item := pop(queue)) is not newcomer:
        ahead += item.work
        item.account.served_tokens += item.work if item.priority == priority else 0
    assert abs(expected - ahead) <= 2 * max(work, *(each.work for each in items))


def test_less_urgent_requests_of_other_tenants_are_not_ahead_and_more_urgent_ones_are() -> None:
    queue, (anna, boris, clara), _ = fill([(1, 0, 10, False), (1, 1, 5000, False), (2, -1, 3000, False)])
    assert queue.work_ahead(new_item(anna, 9, work=100)) == 10 + 3000
    assert queue.work_ahead(new_item(boris, 9, work=100)) == 10 + 3000 and queue.work_ahead(new_item(clara, 9, work=4)) == 4 + 3000


def test_the_tenant_with_the_longest_queue_makes_room() -> None:
    anna, boris, queue = new_account(), new_account(), FairQueue[Waiting]()
    for number in range(4):
        queue.push(new_item(anna, number, priority=number % 2))
    newcomer = new_item(boris, 9)
    assert queue.find_victim(new_item(anna, 8)) is None, "not for its own tenant"
    victim = queue.find_victim(newcomer)
    assert victim is not None and (victim.number, victim.priority) == (3, 1), "the last of the least urgent"
    assert queue.find_victim(new_item(boris, 9, priority=2)) is None, "not for a less urgent request"


@given(ITEMS, st.integers(0, 2), st.integers(-1, 1))
def test_a_victim_is_the_last_request_of_a_tenant_that_keeps_more_than_the_newcomers(
    entries: list[tuple[int, int, int, bool]], tenant: int, priority: int
) -> None:
    queue, accounts, items = fill(entries)
    victim = queue.find_victim(new_item(accounts[tenant], len(items), priority))
    if victim is None:
        return
    waiting = {account: sum(item.account is account for item in items) for account in accounts}
    assert waiting[victim.account] == max(waiting.values()) > waiting[accounts[tenant]] + 1
    assert victim.priority >= priority
    assert victim is [item for item in pop_all(queue) if item.account is victim.account][-1]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(-1, 1), WORKS, st.sampled_from(["push", "pop", "discard", "back"]))))
def test_the_queue_counts_its_items_and_tokens(steps: list[tuple[int, int, int, str]]) -> None:
    accounts, queue, inside, out = [new_account() for _ in range(4)], FairQueue[Waiting](), list[Waiting](), list[Waiting]()
    for number, (tenant, priority, work, step) in enumerate(steps):
        if step == "push":
            inside.append(new_item(accounts[tenant], number, priority, size=number, work=work))
            queue.push(inside[-1])
        elif step == "pop" and inside:
            item = pop(queue)
            assert item.priority == min(one.priority for one in inside)
            inside.remove(item)
            out.append(item)
        elif step == "discard" and inside:
            queue.discard(gone := inside.pop(tenant % len(inside)))
            queue.discard(gone)
        elif step == "back" and out:
            out[-1].had_turn = True
            inside.append(out.pop())
            queue.push(inside[-1])
        assert len(queue) == len(inside) == len(list(queue))
        assert queue.total.size == sum(item.size for item in inside) and queue.total.tokens == 10 * len(inside)
