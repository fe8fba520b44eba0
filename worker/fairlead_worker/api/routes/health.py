"""Operations that every port has. `/health` differs: the kubelet probes the admin port, also of pods that earlier releases rendered."""

from fairlead_worker.api.admin import health, state
from fairlead_worker.api.answers.worker import Health, Readiness, Version
from fairlead_worker.api.routes.operation import Operation

TAG = "Health"
_EVERYWHERE = (
    Operation("GET", "/livez", "get_liveness", "Whether the engine is alive", health.liveness, answer=Health, refusal=503),
    Operation("GET", "/ping", "get_ping", "Whether the worker accepts requests", health.health, answer=Health, refusal=503),
    Operation("POST", "/ping", "post_ping", "Whether the worker accepts requests", health.health, answer=Health, refusal=503),
    Operation("GET", "/ready", "get_readiness", "Whether the worker serves requests", state.ready, answer=Readiness, refusal=503),
    Operation("GET", "/version", "get_version", "Return the release", state.version, answer=Version),
)
OPERATIONS = (
    Operation("GET", "/health", "get_health", "Whether the worker accepts requests", health.health, answer=Health, refusal=503),
    *_EVERYWHERE,
)
ADMIN_OPERATIONS = (
    Operation("GET", "/health", "get_health", "Whether the engine is alive", health.liveness, answer=Health, refusal=503),
    *_EVERYWHERE,
)
"""Of a port that serves only the admin paths."""
