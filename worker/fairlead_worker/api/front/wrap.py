"""Assembly of what stands in front of the API. Without its settings nothing does, so it costs nothing."""

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from fairlead_common.http.origins import EXPOSED_HEADERS, MAX_AGE_SECONDS, parse_origins
from fairlead_common.telemetry.tracer import Tracer
from fairlead_worker.api.front.admin_guard import AdminGuard
from fairlead_worker.api.front.keys import MONITORING, OPEN_PATHS, KeyFile, RequireKey
from fairlead_worker.api.front.observe import Observe
from fairlead_worker.api.routes.apis import ADMIN, Part
from fairlead_worker.config import WorkerConfig


def wrap(app: ASGIApp, config: WorkerConfig, tracer: Tracer | None, part: Part = "all") -> ASGIApp:
    """Return the application of a port behind CORS, then API keys, then traces.

    Browsers read even a 401 and send preflights without a key, so CORS is outermost. Strangers without a key get no span. Admin paths have
    no CORS, and refuse web pages of other origins.
    """
    if tracer is not None or config.log_format == "json":
        app = Observe(app, tracer)
    if config.api_key_file:
        app = RequireKey(app, KeyFile(config.api_key_file), config.pod, OPEN_PATHS | MONITORING if part == "admin" else OPEN_PATHS)
    public = app
    if (origins := parse_origins(config.allowed_origins)) and part != "admin":
        public = CORSMiddleware(
            app, allow_origins=origins, allow_methods=["*"], allow_headers=["*"], expose_headers=EXPOSED_HEADERS, max_age=MAX_AGE_SECONDS
        )
    return public if part == "inference" else AdminGuard(app, public, ADMIN, config.pod)
