"""Settings of the API that name files, or origins: checked at the start, before the model is loaded."""

from pathlib import Path
from typing import Annotated, Final

from pydantic import AfterValidator

from fairlead_common.errors import PromptError
from fairlead_common.http.origins import parse_origins
from fairlead_common.prompts.messages import check_template

MAX_FILE_BYTES: Final = 1 << 20


def read_file(path: str) -> str:
    """Return the text of a small file. Raises ValueError with the reason."""
    try:
        with Path(path).open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
        text = content.decode()
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError("is no UTF-8 text") from None
    if len(content) > MAX_FILE_BYTES:
        raise ValueError(f"is larger than {MAX_FILE_BYTES} bytes")
    return text


def read_keys(path: str) -> frozenset[str]:
    """Return the keys of a file: one a line, without empty lines and those that start with #. Raises ValueError."""
    keys = frozenset(line.strip() for line in read_file(path).splitlines() if line.strip() and not line.lstrip().startswith("#"))
    if not keys:
        raise ValueError("has no key; give one a line")
    if not all(key.isascii() and key.isprintable() and " " not in key for key in keys):
        raise ValueError("has a key with a space or another character than visible ASCII; give one key a line")
    return keys


def _check_keys(path: str) -> str:
    if path:
        read_keys(path)
    return path


def _check_template(path: str) -> str:
    if path:
        try:
            check_template(read_file(path))
        except PromptError as error:
            raise ValueError(error.reason.replace("the model's chat template", "it")) from None
    return path


def _check_origins(value: str) -> str:
    parse_origins(value)
    return value


ApiKeyFile = Annotated[str, AfterValidator(_check_keys)]
ChatTemplateFile = Annotated[str, AfterValidator(_check_template)]
AllowedOrigins = Annotated[str, AfterValidator(_check_origins)]
