"""Operations that every port has."""

from fairlead_worker.api.admin import state
from fairlead_worker.api.routes.answers.worker import Health, Readiness, Version
from fairlead_worker.api.routes.operation import Operation

TAG = "Health"
OPERATIONS = (
    Operation("GET", "/health", "get_health", "Whether the engine is alive", state.health, answer=Health, refusal=503),
    Operation("GET", "/ready", "get_readiness", "Whether the worker serves requests", state.ready, answer=Readiness, refusal=503),
    Operation("GET", "/version", "get_version", "Return the release", state.version, answer=Version),
)
