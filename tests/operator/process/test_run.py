"""The operator as one coroutine: what happens when a part of it fails."""

import asyncio
from collections.abc import Callable

import pytest

from fairlead_operator.process.loop_thread import LoopThread
from fairlead_operator.run import _Operator


class Election:
    """Leads forever, as `LeaderElector.lead` does."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()

    async def lead(self, acquired: Callable[[], object]) -> None:
        try:
            acquired()
            await asyncio.Event().wait()
        finally:
            self.ended.set()


class Failing(_Operator):
    """Has a lease, and fails when it starts to reconcile."""

    def __init__(self, election: Election, loop_thread: LoopThread) -> None:
        self._elector, self._loop_thread = election, loop_thread  # type: ignore[assignment]

    async def _reconcile(self, leads: asyncio.Event) -> None:
        await leads.wait()
        raise ValueError("no service can be reconciled")


async def test_an_operator_that_fails_while_it_leads_stops_the_election_and_raises_the_error() -> None:
    async with LoopThread.start("lease") as loop_thread:
        election = Election()
        with pytest.raises(ValueError, match="no service"):
            await Failing(election, loop_thread)._lead()

        async def ended() -> None:
            await asyncio.wait_for(election.ended.wait(), 10)

        await loop_thread.run(ended())
