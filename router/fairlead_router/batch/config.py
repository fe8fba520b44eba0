"""Configuration of `fairlead-batch`: flags, each with an environment variable `FAIRLEAD_<FLAG>` (flags win)."""

from dataclasses import dataclass

from pydantic import Field, field_validator
from pydantic_settings import SettingsConfigDict

from fairlead_common.flags import FlagSettings
from fairlead_common.telemetry.logs import LogFormat, LogLevel

DAY = 86_400


@dataclass(frozen=True)
class BatchLimits:
    """What a tenant may store (docs/guides/batch.md). No flag changes these."""

    max_file_bytes: int = 200 << 20
    max_lines: int = 50_000  # of a batch
    max_line_bytes: int = 4 << 20
    max_batches: int = 1000  # ended ones included
    max_files: int = 5000
    max_stored_bytes: int = 50 << 30  # above it uploads and batches are refused
    retention: int = 30 * DAY  # seconds until files expire, and until ended batches are removed


LIMITS = BatchLimits()


class BatchConfig(FlagSettings):
    """Flags of `fairlead-batch`."""

    model_config = SettingsConfigDict(cli_prog_name="fairlead-batch")

    storage: str = Field(description="file:///FOLDER or s3://BUCKET/FOLDER with files, batches and results; only one process may use it")
    router_url: str = Field(description="URL of the service's routers, to which the lines of batches are sent")
    router_certfile: str = Field(
        "",
        description="PEM file with the certificate that https routers present, the only one accepted (empty: the system's authorities)",
    )
    secret_file: str = Field("", description="file with the secret shared with the routers (empty: every request is trusted)")
    host: str = Field("0.0.0.0", description="address to listen on")
    port: int = Field(8090, ge=0, le=65535, description="port to listen on (0: any free one)")
    max_concurrency: int = Field(64, ge=1, le=4096, description="most lines in flight; fewer while the service is busy")
    log_level: LogLevel = Field("INFO", description="least important lines that are logged")
    log_format: LogFormat = Field("text", description="json: one JSON object a line")

    @field_validator("storage")
    @classmethod
    def _known_scheme(cls, value: str) -> str:
        if not value.startswith(("file:///", "s3://")):
            raise ValueError("give file:///FOLDER or s3://BUCKET/FOLDER")
        return value

    @field_validator("router_url")
    @classmethod
    def _is_http(cls, value: str) -> str:
        if not value.startswith(("http://", "https://")):
            raise ValueError("give http://HOST:PORT")
        return value.rstrip("/")


def read_config(arguments: list[str]) -> BatchConfig:
    """Read the command line and the environment. Raises SettingsError for an unknown flag, ValidationError for a bad value."""
    return BatchConfig(_cli_parse_args=arguments)
