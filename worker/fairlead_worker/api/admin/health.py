"""Health and liveness. Health is vLLM's: 200 only while requests are served. Liveness is for the kubelet, which restarts what fails."""

from fairlead_worker.api.answers.worker import Health
from fairlead_worker.api.http import RequestContext
from fairlead_worker.api.worker import Worker


async def health(worker: Worker, context: RequestContext) -> None:
    """Answer 200 while this worker accepts requests. Scripts for vLLM wait for it before they send the first one."""
    if worker.serving and worker.healthy:
        await context.respond_json(Health("ok", worker.engine.state.phase))
        return
    phase = "draining" if worker.draining else worker.engine.state.phase
    reason = worker.engine.state.reason or worker.engine.state.step
    await context.respond_json(Health(phase, reason=reason), status=503)


async def liveness(worker: Worker, context: RequestContext) -> None:
    """Answer 200 while the engine is alive: its load makes progress, or it sent a message recently."""
    state = worker.engine.state
    if worker.healthy:
        await context.respond_json(Health("ok", state.phase))
        return
    stuck = worker.engine.seconds_without_progress()
    silence = (
        f"the load has made no progress for {stuck:.0f} s"
        if stuck
        else f"the engine has sent no message for {worker.engine.seconds_since_message():.0f} s"
    )
    reason = state.reason or silence
    await context.respond_json(Health("failed", reason=reason), status=503)
