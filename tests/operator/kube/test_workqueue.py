"""Whose turn it is, and that no lane is lost."""

import asyncio
import socket

from fairlead_operator.kube.workqueue import Lanes


async def turn(lanes: Lanes, order: list[str], name: str, *, urgent: bool) -> None:
    await lanes.acquire(urgent=urgent)
    order.append(name)
    lanes.release()


async def test_an_edit_goes_before_what_waits_longer_and_a_cancelled_pass_takes_no_lane_with_it() -> None:
    lanes, order = Lanes(1), list[str]()
    await lanes.acquire(urgent=False)
    waiting = [
        asyncio.create_task(turn(lanes, order, name, urgent=name.startswith("edit")))
        for name in ("look 1", "look 2", "edit 1", "look 3", "edit 2")
    ]
    await asyncio.sleep(0)
    waiting[1].cancel()
    lanes.release()
    waiting[2].cancel()  # in the moment in which it is given the lane
    await asyncio.gather(*waiting, return_exceptions=True)
    assert order == ["edit 2", "look 1", "look 3"]
    await asyncio.wait_for(lanes.acquire(urgent=False), 1)


async def test_a_flood_of_edits_leaves_every_fourth_turn_to_the_others() -> None:
    lanes, order = Lanes(2), list[str]()
    await asyncio.gather(*(lanes.acquire(urgent=True) for _ in range(2)))
    waiting = [asyncio.create_task(turn(lanes, order, "edit", urgent=True)) for _ in range(40)] + [
        asyncio.create_task(turn(lanes, order, "look", urgent=False)) for _ in range(3)
    ]
    await asyncio.sleep(0)
    lanes.release()
    lanes.release()
    await asyncio.gather(*waiting)
    assert order.index("look") >= 3 and order[:13].count("look") == 3, order


async def test_an_answer_is_heard_before_all_passes_that_never_wait_are_over() -> None:
    lanes, order = Lanes(2), []
    loop, (here, there) = asyncio.get_running_loop(), socket.socketpair()

    async def one(name: str) -> None:
        await lanes.acquire(urgent=False)
        order.append(name)
        if name == "look 0":
            there.send(b"an answer")
        lanes.release()

    def heard() -> None:
        loop.remove_reader(here)
        order.append("answer")

    loop.add_reader(here, heard)
    await asyncio.gather(*(one(f"look {number}") for number in range(30)))
    assert "answer" in order[:8], order
    here.close()
    there.close()
