"""`POST /fairlead/score`: where a request would go now, and each term of the score. Nothing is sent or reserved."""

from typing import Final

import msgspec

from fairlead_router.errors import ApiError
from fairlead_router.fleet.workers import WorkerTable
from fairlead_router.interop.index_lookups import IndexLookups
from fairlead_router.request.prompts import Prompts
from fairlead_router.routing.prefix_aware import PrefixAware
from fairlead_router.tenancy.tenants import Caller

PATH: Final = "/fairlead/score"


class ScorePage:
    """Ranks the workers for a request that is not sent. `policy` is None if the router's has no score. `lookups`: None without an index."""

    def __init__(self, prompts: Prompts, table: WorkerTable, policy: PrefixAware | None, lookups: IndexLookups | None, name: str) -> None:
        """`name`: of the router's policy."""
        self._prompts, self._table, self._policy, self._lookups, self._name = prompts, table, policy, lookups, name

    async def answer(self, raw: bytes, caller: Caller) -> bytes:
        """Return the ranking of a completion's or a chat's body, as if `caller` sent it. Raises ApiError."""
        if self._policy is None:
            message = f"Policy {self._name} has no score: only PrefixAware compares workers by one."
            raise ApiError(501, message, kind="server_error", code="no_score")
        prompt = await self._prompts.read("", raw, caller)
        if self._lookups is None:
            ranking = await self._policy.rank(prompt)
        else:
            async with self._lookups.turn(caller.tenant.name):
                ranking = await self._lookups.rank(prompt)
        workers = [
            {
                "pod": worker.pod if (worker := self._table.get(start.address)) is not None else "",
                "address": start.address,
                "cached_tokens": start.cached,
                "terms": start.terms(),
                "ttft": start.seconds,
                "score": start.score,
                "fits": start.fits,
            }
            for start in ranking.starts
        ]
        return msgspec.json.encode({"prompt_tokens": prompt.prompt_tokens, "source": ranking.source, "workers": workers})
