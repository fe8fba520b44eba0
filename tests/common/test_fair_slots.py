"""Slots go to tenants in rotation, one for each."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlead_common.fair_slots import FairSlots


@given(st.integers(1, 3), st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=12))
def test_slots_alternate_between_tenants_and_lose_no_waiter(count: int, asked: list[tuple[str, bool]]) -> None:
    """`asked`: for each request, its tenant and whether it is cancelled while it waits."""

    async def play() -> None:
        slots, came, holding = FairSlots(count), list[tuple[str, int]](), dict[str, int]()
        for number in range(count):
            await slots.acquire(f"first {number}")

        async def take(number: int, tenant: str) -> None:
            slot = await slots.acquire(tenant)
            assert tenant not in holding and slot not in holding.values(), "one for each tenant, and each once"
            holding[tenant] = slot
            came.append((tenant, number))

        waiting = []
        for number, (tenant, _) in enumerate(asked):
            waiting.append(asyncio.create_task(take(number, tenant)))
            await asyncio.sleep(0)
        for task, (_, cancelled) in zip(waiting, asked, strict=True):
            if cancelled:
                task.cancel()
        stay = [(tenant, number) for number, (tenant, cancelled) in enumerate(asked) if not cancelled]
        await asyncio.sleep(0)
        for number in range(count):
            slots.release(f"first {number}", number)
        for _ in range(len(stay)):
            for _ in range(3):
                await asyncio.sleep(0)
            left = {tenant for tenant, _ in stay} - {tenant for tenant, _ in came}
            assert len(holding) == count or left <= set(holding), "no slot is free while a tenant without one waits"
            if holding:
                tenant = next(iter(holding))
                slots.release(tenant, holding.pop(tenant))
        for tenant, slot in holding.items():
            slots.release(tenant, slot)
        assert sorted(came) == sorted(stay)
        for tenant in "abc":
            mine = [number for other, number in came if other == tenant]
            assert mine == sorted(mine), "first come, first served within a tenant"
        for at in range(1, len(came) if count == 1 else 0):
            left = {tenant for tenant, _ in came[at:]}
            assert came[at][0] != came[at - 1][0] or left == {came[at][0]}, "the same tenant twice only while no other waits"
        await asyncio.wait_for(slots.acquire("last"), 1)

    asyncio.run(play())


async def test_a_slot_granted_to_a_cancelled_waiter_goes_to_the_next() -> None:
    slots = FairSlots(1)
    slot = await slots.acquire("a")
    second = asyncio.create_task(slots.acquire("a"))
    third = asyncio.create_task(slots.acquire("b"))
    await asyncio.sleep(0)
    slots.release("a", slot)
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    assert await asyncio.wait_for(third, 1) == slot
