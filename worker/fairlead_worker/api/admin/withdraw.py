"""`POST /internal/withdraw/ATTEMPT`: the router takes a request back that has not started, to send it to another worker."""

from fairlead_worker.api.errors import ApiError
from fairlead_worker.api.http import RequestContext
from fairlead_worker.api.worker import Worker


async def withdraw(worker: Worker, context: RequestContext) -> None:
    """Ask the engine to drop a request, and answer 202 at once; 404 if there is no such request.

    The request's own answer says what happened: 503 with `x-fairlead-retry: withdrawn` if it was dropped, else its usual answer, because
    it had started. So it is answered exactly once, whatever happens to this call.
    """
    generation = worker.engine.attempts.get(context.path.rpartition("/")[2])
    if generation is None:
        raise ApiError(404, "there is no such attempt here: the request has ended, or it was never sent to this worker", code="not_found")
    generation.withdraw()
    await context.respond(202, b"{}")
