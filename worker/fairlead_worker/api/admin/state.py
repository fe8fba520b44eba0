"""The worker's state: health, readiness, load, models, prompt format, metrics, version."""

import hmac
import re

import msgspec
from msgspec import UNSET

from fairlead_common.protocols.model_list import ANTHROPIC_VERSION, Model, ModelList, to_anthropic_list, to_anthropic_model
from fairlead_common.truncate import quote
from fairlead_worker.api.admin.prefix_warmup import MAX_TOKENS, HotPrefixesReply, WarmPrefix, build_bearer
from fairlead_worker.api.answers.worker import Health, Load, Readiness, Version
from fairlead_worker.api.engine.index_publisher import to_worker_load
from fairlead_worker.api.errors import ApiError, invalid, unavailable
from fairlead_worker.api.http import RequestContext
from fairlead_worker.api.worker import Worker
from fairlead_worker.platform.version import release


async def health(worker: Worker, context: RequestContext) -> None:
    """Answer 200 while this worker accepts requests. Scripts for vLLM wait for it before they send the first one."""
    if worker.serving and worker.healthy:
        await context.respond_json(Health("ok", worker.engine.state.phase))
        return
    phase = "draining" if worker.draining else worker.engine.state.phase
    reason = worker.engine.state.reason or worker.engine.state.step
    await context.respond_json(Health(phase, reason=reason), status=503)


async def liveness(worker: Worker, context: RequestContext) -> None:
    """Answer 200 while the engine is alive: its load makes progress, or it sent a message recently. The kubelet restarts what fails."""
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


async def ready(worker: Worker, context: RequestContext) -> None:
    """Answer 200 when the model is loaded and the worker is not draining. The index does not matter."""
    state = worker.engine.state
    phase: str = state.phase
    stage = state.stage
    if worker.warming and phase == "ready":
        phase, stage = "loading", "Warming"
    phase = "draining" if worker.draining else phase
    serving = worker.serving and worker.healthy
    answer = Readiness(
        ready=serving,
        phase=phase,
        percent=state.percent,
        reason=state.reason or state.step,
        fallback=worker.fallback or UNSET,
        start_up_seconds={name: round(spent, 3) for name, spent in state.start_up.seconds.items()},
    )
    if phase in ("starting", "loading"):
        answer.stage, answer.bytes, answer.total_bytes = stage, state.done, state.total
    await context.respond_json(answer, status=200 if serving else 503)


async def load(worker: Worker, context: RequestContext) -> None:
    """Return the worker's load for routers without an index, and its counters, from which any router knows the whole fleet's work."""
    load = worker.engine.state.load
    answer = Load(
        pod=worker.config.pod,
        address=worker.address,
        draining=worker.draining,
        ready=worker.serving and worker.healthy,
        max_running=worker.config.max_num_seqs,
        scheduling_policy=worker.config.scheduling_policy,
        server_load=worker.in_flight,
        incarnation=worker.incarnation() or UNSET,
        canary=worker.config.canary or UNSET,
        fallback=worker.fallback or UNSET,
        adapters=worker.adapters.describe() or UNSET,
        prompt_tokens=load.prompt_tokens,
        cached_tokens=load.cached_tokens,
        output_tokens=load.output_tokens,
        **msgspec.to_builtins(to_worker_load(load, worker.config.page_size, worker.engine.arrival_rate)),
    )
    await context.respond_json(answer)


async def models(worker: Worker, context: RequestContext) -> None:
    """`GET /v1/models`."""
    adapters = [adapter.info.name for adapter in worker.adapters]
    listed = [_model(worker, name) for name in (*worker.config.names, *adapters)]
    anthropic = ANTHROPIC_VERSION in context.headers
    await context.respond_json(to_anthropic_list(listed) if anthropic else ModelList(listed))


async def model(worker: Worker, context: RequestContext) -> None:
    """`GET /v1/models/{name}`."""
    found = _model(worker, worker.check_model(context.path.removeprefix("/v1/models/")))
    await context.respond_json(to_anthropic_model(found) if ANTHROPIC_VERSION in context.headers else found)


async def hot_prefixes(worker: Worker, context: RequestContext) -> None:
    """`GET /internal/hot-prefixes/TOKENS`: return the prefixes that a new worker of this service should compute before it serves.

    The answer is msgpack: token ids of whole pages under their root hashes. Salts are not sent; a root hash covers one. Only workers of
    the same service may read it: token ids are prompts, and monitoring may reach this port too.
    """
    try:
        expected = build_bearer(worker.config.redis)
    except OSError as error:
        raise unavailable(str(error)) from error
    if not hmac.compare_digest(context.headers.get(b"authorization", b""), expected.encode()):
        raise ApiError(401, "hot prefixes are only for workers with this service's Redis credential.", code="unauthorized")
    requested = context.path.rpartition("/")[2]
    if not re.fullmatch("[0-9]{1,9}", requested):
        raise invalid(f"{quote(requested)} is not a number of tokens; the path is /internal/hot-prefixes/TOKENS, at most 9 digits")
    most = min(worker.config.warmup_tokens, MAX_TOKENS)  # 0: without warm-up, a service returns no prompts
    prefixes = await worker.engine.hot_prefixes(min(int(requested), most)) if worker.serving and most else ()
    known = worker.recent_roots
    warm = tuple(WarmPrefix(prefix.root, prefix.tokens, known[prefix.root]) for prefix in prefixes if prefix.root in known)
    data = msgspec.msgpack.encode(HotPrefixesReply(worker.prompt_etag, warm))
    await context.respond(200, data, type="application/msgpack")


async def prompt_format(worker: Worker, context: RequestContext) -> None:
    """Return how prompts become tokens and block hashes. A router asks once per ETag, which is the same with and without gzip."""
    worker.check_loaded()
    data = worker.ready.prompt_format
    headers = {"etag": worker.prompt_etag, "vary": "accept-encoding"}
    known = context.headers.get(b"if-none-match", b"").decode("latin-1").split(",")
    if worker.prompt_etag in (tag.strip() for tag in known):
        await context.respond(304, b"", headers)
    elif b"gzip" in context.headers.get(b"accept-encoding", b""):
        await context.respond(200, await worker.gzipped_prompt_format(), headers | {"content-encoding": "gzip"})
    else:
        await context.respond(200, data, headers)


async def metrics(worker: Worker, context: RequestContext) -> None:
    worker.metrics.in_flight.set(worker.in_flight)
    await context.respond(200, worker.metrics.render(), type=worker.metrics.content_type)


async def version(worker: Worker, context: RequestContext) -> None:
    await context.respond_json(Version(release()))


def _model(worker: Worker, name: str) -> Model:
    worker.check_loaded()
    adapter = next((one for one in worker.adapters if one.info.name == name), None)
    return Model(
        id=name,
        created=adapter.loaded_at if adapter else worker.started,
        root=adapter.info.uri if adapter else worker.config.model,
        parent=worker.config.names[0] if adapter else None,
        max_model_len=worker.max_model_len,
    )
