"""Configuration of `fairlead-batch`: flags, each with an environment variable `FAIRLEAD_<FLAG>` (flags win)."""

from pydantic import Field, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from fairlead_common.telemetry.logs import LogFormat, LogLevel

DAY = 86_400


class BatchConfig(BaseSettings):
    """Flags of `fairlead-batch`."""

    model_config = SettingsConfigDict(
        env_prefix="FAIRLEAD_",
        frozen=True,
        extra="ignore",
        cli_prog_name="fairlead-batch",
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_exit_on_error=False,
    )

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
    max_file_bytes: int = Field(200 << 20, ge=1024, description="largest uploaded file, bytes")
    max_lines: int = Field(50_000, ge=1, le=1_000_000, description="most lines of a batch")
    max_line_bytes: int = Field(4 << 20, ge=1024, le=64 << 20, description="longest line of a batch, bytes")
    max_batches: int = Field(1000, ge=1, description="most stored batches of a tenant, ended ones included")
    max_files: int = Field(5000, ge=1, description="most stored files of a tenant")
    max_stored_bytes: int = Field(50 << 30, ge=1024, description="stored bytes of a tenant above which uploads and batches are refused")
    retention: int = Field(30 * DAY, ge=60, description="seconds until files expire, and until ended batches are removed")
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
