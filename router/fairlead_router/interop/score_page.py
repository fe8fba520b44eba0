"""`POST /fairlead/score`: where a request would go now, and each term of the score. Nothing is sent or reserved."""

from collections.abc import Awaitable, Callable
from typing import Any, Final

from fairlead_router.errors import ApiError
from fairlead_router.fleet.workers import WorkerTable
from fairlead_router.request.prompts import Prompts
from fairlead_router.routing.policies import RoutingRequest
from fairlead_router.routing.ranking import Ranking
from fairlead_router.serving.upstream_request import build_routing_request
from fairlead_router.tenancy.tenants import ANONYMOUS

PATH: Final = "/fairlead/score"
Rank = Callable[[RoutingRequest], Awaitable[Ranking]]


class ScorePage:
    """Ranks the workers for a request that is not sent. `rank` is None with a policy that has no score."""

    def __init__(self, prompts: Prompts, table: WorkerTable, rank: Rank | None, policy: str) -> None:
        self._prompts, self._table, self._rank, self._policy = prompts, table, rank, policy

    async def answer(self, raw: bytes) -> dict[str, Any]:
        """Return the ranking of a completion's or a chat's body. Raises ApiError."""
        if self._rank is None:
            message = f"Policy {self._policy} has no score: only PrefixAware compares workers by one."
            raise ApiError(501, message, kind="server_error", code="no_score")
        prompt = await self._prompts.read("", raw)
        ranking = await self._rank(build_routing_request(prompt, ANONYMOUS, ""))
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
        return {"prompt_tokens": prompt.length, "source": ranking.source, "workers": workers}
