"""Records of files and batches: what is stored, and the objects of OpenAI's API that clients see. Immutable."""

import os
import time
from typing import Any, Literal

import msgspec

Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]
ENDED: frozenset[Status] = frozenset(("failed", "completed", "expired", "cancelled"))


class FileRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """A file. Times are in seconds since the epoch."""

    id: str
    tenant: str
    filename: str
    purpose: str
    bytes: int
    created_at: int
    expires_at: int

    def to_object(self) -> dict[str, Any]:
        """Return OpenAI's file object."""
        fields = {name: value for name, value in msgspec.to_builtins(self).items() if name != "tenant"}
        return {"object": "file", **fields, "status": "processed", "status_details": None}


class Problem(msgspec.Struct, frozen=True):
    """Why a batch failed its validation. `line` starts at 1."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class BatchRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """A batch. `output_id` and `error_id` are chosen when it is created, so that writing the files can be repeated after a crash."""

    id: str
    tenant: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    output_id: str
    error_id: str
    file_lifetime: int
    """Seconds from the creation of the output files until they expire."""
    metadata: dict[str, str] | None = None
    status: Status = "validating"
    outcome: Status | None = None
    """Final status, from when all result lines are durable: from then on, their logs become files."""
    model: str | None = None
    total: int = 0
    completed: int = 0
    failed: int = 0
    has_output: bool = False
    has_errors: bool = False
    problems: list[Problem] = []
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None

    @property
    def is_ended(self) -> bool:
        return self.status in ENDED

    @property
    def ended_at(self) -> int:
        """Return when the batch ended; 0 while it has not."""
        return (self.completed_at or self.failed_at or self.expired_at or self.cancelled_at or 0) if self.is_ended else 0

    def to_object(self, completed: int, failed: int) -> dict[str, Any]:
        """Return OpenAI's batch object, with the present counts."""
        times = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
        errors = {"object": "list", "data": msgspec.to_builtins(self.problems)} if self.problems else None
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "model": self.model,
            "errors": errors,
            "input_file_id": self.input_file_id,
            "completion_window": self.completion_window,
            "status": self.status,
            "output_file_id": self.output_id if self.has_output else None,
            "error_file_id": self.error_id if self.has_errors else None,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            **{f"{name}_at": getattr(self, f"{name}_at") for name in times},
            "request_counts": {"total": self.total, "completed": completed, "failed": failed},
            "metadata": self.metadata,
        }


def new_id(prefix: str) -> str:
    """Return an identifier that sorts by creation: 16 hexadecimal digits of time, and 16 random ones."""
    return f"{prefix}{time.time_ns():016x}{os.urandom(8).hex()}"
