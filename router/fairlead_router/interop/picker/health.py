"""gRPC health service: live while the process answers, ready when the router is."""

from collections.abc import AsyncIterator
from typing import Any

import grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthServicer

from fairlead_router.interop.picker.picker import Picker

EXT_PROC = "envoy.service.ext_proc.v3.ExternalProcessor"
LIVE = frozenset(("liveness",))
READY = frozenset(("", "readiness", EXT_PROC))
WATCH_SECONDS = 1.0


class Health(HealthServicer):  # type: ignore[misc]  # grpc_health has no types
    """Health service with the names of proposal 004: `liveness`, `readiness` and the processor's own; empty means all."""

    def __init__(self, picker: Picker) -> None:
        self._picker = picker

    async def Check(self, request: HealthCheckRequest, context: Any) -> HealthCheckResponse:
        status = self._status(request.service)
        if status is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"there is no service {request.service[:200]!r}")
        return HealthCheckResponse(status=status)

    async def Watch(self, request: HealthCheckRequest, context: Any) -> AsyncIterator[HealthCheckResponse]:
        """Yield the status now, and at each change."""
        sent = None
        while True:
            status = self._status(request.service)
            if status is None:
                status = HealthCheckResponse.SERVICE_UNKNOWN
            if status != sent:
                yield HealthCheckResponse(status=status)
                sent = status
            await self._picker.wait_for_change(WATCH_SECONDS)

    def _status(self, service: str) -> Any:
        if service in LIVE:
            return HealthCheckResponse.SERVING
        if service in READY:
            return HealthCheckResponse.NOT_SERVING if self._picker.not_ready_reason() else HealthCheckResponse.SERVING
        return None
