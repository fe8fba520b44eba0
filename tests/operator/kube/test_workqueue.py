"""Which service is reconciled next, and that each slot is returned."""

import asyncio
import socket

from fairlead_operator.kube.workqueue import WorkQueue


async def turn(work_queue: WorkQueue, order: list[str], name: str, *, urgent: bool) -> None:
    await work_queue.acquire(urgent=urgent)
    order.append(name)
    work_queue.release()


async def test_an_edit_goes_first_and_a_cancelled_reconcile_leaks_no_slot() -> None:
    work_queue, order = WorkQueue(1), list[str]()
    await work_queue.acquire(urgent=False)
    waiting = [
        asyncio.create_task(turn(work_queue, order, name, urgent=name.startswith("edit")))
        for name in ("look 1", "look 2", "edit 1", "look 3", "edit 2")
    ]
    await asyncio.sleep(0)
    waiting[1].cancel()
    work_queue.release()
    waiting[2].cancel()  # in the moment in which it is given the lane
    await asyncio.gather(*waiting, return_exceptions=True)
    assert order == ["edit 2", "look 1", "look 3"]
    await asyncio.wait_for(work_queue.acquire(urgent=False), 1)


async def test_a_flood_of_edits_leaves_every_fourth_turn_to_the_others() -> None:
    work_queue, order = WorkQueue(2), list[str]()
    await asyncio.gather(*(work_queue.acquire(urgent=True) for _ in range(2)))
    waiting = [asyncio.create_task(turn(work_queue, order, "edit", urgent=True)) for _ in range(40)] + [
        asyncio.create_task(turn(work_queue, order, "look", urgent=False)) for _ in range(3)
    ]
    await asyncio.sleep(0)
    work_queue.release()
    work_queue.release()
    await asyncio.gather(*waiting)
    assert order.index("look") >= 3 and order[:13].count("look") == 3, order


async def test_responses_are_read_between_reconciles_that_never_wait() -> None:
    work_queue, order = WorkQueue(2), []
    loop, (here, there) = asyncio.get_running_loop(), socket.socketpair()

    async def one(name: str) -> None:
        await work_queue.acquire(urgent=False)
        order.append(name)
        if name == "look 0":
            there.send(b"an answer")
        work_queue.release()

    def heard() -> None:
        loop.remove_reader(here)
        order.append("answer")

    loop.add_reader(here, heard)
    await asyncio.gather(*(one(f"look {number}") for number in range(30)))
    assert "answer" in order[:8], order
    here.close()
    there.close()
