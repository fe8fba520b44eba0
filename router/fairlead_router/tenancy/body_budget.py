"""Budget for the request bodies in memory, from their first byte until their answers begin."""

from collections import Counter

from fairlead_router.errors import ApiError, overloaded, unavailable


class InflightBodyBudget:
    """Budget in bytes. No tenant may have more than half."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._each: Counter[str] = Counter()
        self.total = 0

    def acquire(self, tenant: str, size: int) -> None:
        """Reserve `size` bytes. Raises ApiError: 429 if the tenant has its half, 503 if the budget is exhausted."""
        if self.total + size > self._limit:
            raise self._with_close(
                unavailable("The router keeps as many request bodies as it may (--max-inflight-bytes). Try again in 1 s.", retry_after=1)
            )
        if tenant and self._each[tenant] + size > self._limit // 2:
            raise self._with_close(
                overloaded("Your other requests use half of the router's budget for request bodies. Try again in 1 s.", 1)
            )
        self._each[tenant] += size
        self.total += size

    def release(self, tenant: str, size: int) -> None:
        self.total -= size
        self._each[tenant] -= size
        if not self._each[tenant]:
            del self._each[tenant]

    @staticmethod
    def _with_close(error: ApiError) -> ApiError:
        error.headers.append((b"connection", b"close"))  # the rest of the body is not read
        return error
