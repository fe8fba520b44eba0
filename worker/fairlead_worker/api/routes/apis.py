"""All APIs, and which of them each port serves."""

from collections.abc import Mapping
from typing import Literal

from fairlead_worker.api.routes import admin, anthropic, health, openai, pooling, tokens
from fairlead_worker.api.routes.operation import Operation

Part = Literal["all", "inference", "admin"]
"""The set of paths that a port serves. Every port serves health checks and `version`."""
_INFERENCE = {api.TAG: api.OPERATIONS for api in (openai, anthropic, pooling, tokens)}
_ADMIN = {admin.TAG: admin.OPERATIONS}


def select_apis(part: Part) -> Mapping[str, tuple[Operation, ...]]:
    """Return the operations of a port, by the tag of their API."""
    checks = health.ADMIN_OPERATIONS if part == "admin" else health.OPERATIONS
    return (_INFERENCE if part != "admin" else {}) | (_ADMIN if part != "inference" else {}) | {health.TAG: checks}
