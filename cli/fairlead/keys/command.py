"""`fairlead keys new TENANT` creates an API key, and `fairlead keys check FILE` checks a key file (docs/guides/keys-and-tenants.md)."""

import hashlib
import os
import re
import secrets
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from fairlead.errors import UserError
from fairlead.options import Output, print_data, takes
from fairlead.program import describe, new_app
from fairlead_router.tenancy.tenants import Caller, KeyFileError, read_keys

PREFIX = "fl-"
"""Prefix of keys, by which secret scanners find a leaked one."""
NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")


app = new_app(
    help=describe("API keys of tenants, for a service's Secret.", "fairlead keys new team-a -f keys.yaml", "fairlead keys check keys.yaml")
)


@dataclass(frozen=True, kw_only=True)
class NewKey:
    """The options of `fairlead keys new`."""

    tenant: Annotated[str, typer.Argument(metavar="TENANT")]
    file: Annotated[Path, typer.Option("--file", "-f", metavar="FILE", help="Key file, created if absent.")] = Path("keys.yaml")
    name: Annotated[str | None, typer.Option(metavar="NAME", help="Name of the key, shown in logs (default: key-N).")] = None
    priority: Annotated[
        int | None, typer.Option(metavar="N", help="Most urgent priority of its requests; lower goes first (default: the tenant's).")
    ] = None
    tokens_per_minute: Annotated[int | None, typer.Option(metavar="N", help="Token rate of the tenant, for all its keys together.")] = None
    weight: Annotated[float | None, typer.Option(metavar="W", help="The tenant's weight under fair queueing (default 1).")] = None


@dataclass(frozen=True, kw_only=True)
class KeyFile:
    """The options of `fairlead keys check`."""

    file: Annotated[Path, typer.Argument(metavar="FILE")]
    output: Output = "table"


@app.command("new", help="Create a key: print it once, and write its hash to the file.")
@takes(NewKey)
def run_new(options: NewKey) -> int:
    """Create a key. Only the key goes to stdout, so that it can be piped; the next steps go to stderr."""
    found = _read(options.file)
    key = PREFIX + secrets.token_urlsafe(32)
    add_key(found, options.tenant, key, options.name, options.priority, options.tokens_per_minute, options.weight)
    text = yaml.safe_dump(found, sort_keys=False)
    try:
        read_keys(text.encode())
    except KeyFileError as error:
        raise UserError(f"{options.file} would be invalid: {error}") from None
    _write(options.file, text)
    print(key)
    print(
        f"# {options.file} has the key's hash only: store the key now. To give the file to a service's routers:\n"
        f"#   kubectl create secret generic NAME-keys --from-file=keys.yaml={options.file}"
        " --dry-run=client -o yaml | kubectl apply -f -\n"
        "# and in the InferenceService: spec.access.keysSecretRef: {name: NAME-keys}",
        file=sys.stderr,
    )
    return 0


@app.command("check", help="Check whether routers accept a key file, and list its keys.")
@takes(KeyFile)
def run_check(options: KeyFile) -> int:
    try:
        callers = read_keys(options.file.read_bytes())
    except OSError as error:
        raise UserError(f"{options.file}: {error.strerror}") from None
    except KeyFileError as error:
        raise UserError(f"{options.file} cannot be used: {error}") from None
    tenants = {caller.tenant.name: caller.tenant for caller in callers.values()}
    if options.output != "table":
        print_data([_as_data(caller) for caller in callers.values()], options.output)
        return 0
    for name, tenant in sorted(tenants.items()):
        rate = f"{tenant.rate * 60:.0f} tokens per minute" if tenant.rate else "no token rate"
        keys = sorted(_describe(caller) for caller in callers.values() if caller.tenant.name == name)
        print(f"{name}: {rate}, weight {tenant.weight:g}; {', '.join(keys)}")
    return 0


def _as_data(caller: Caller) -> dict[str, Any]:
    tenant = caller.tenant
    rate = tenant.rate * 60 if tenant.rate else None
    settings = {"tenant": tenant.name, "tokensPerMinute": rate, "weight": tenant.weight}
    return settings | {"key": caller.key, "priority": caller.priority, "class": caller.slo_class or None}


def _describe(caller: Caller) -> str:
    service_class = f", class {caller.slo_class}" if caller.slo_class else ""
    return f"{caller.key} (priority {caller.priority}{service_class})"


def add_key(
    found: dict[str, Any],
    tenant: str,
    key: str,
    name: str | None = None,
    priority: int | None = None,
    tokens_per_minute: int | None = None,
    weight: float | None = None,
) -> None:
    """Add a key's hash to the contents of a key file. Raises UserError for an invalid or repeated name."""
    if not NAME.fullmatch(tenant):
        raise UserError(f"tenant {tenant!r}: use at most 63 letters, digits, '.', '_' and '-', with a letter or digit at both ends")
    found.setdefault("saltSecret", secrets.token_urlsafe(32))
    settings = found.setdefault("tenants", {}).setdefault(tenant, {"keys": []})
    if tokens_per_minute is not None:
        settings["tokensPerMinute"] = tokens_per_minute
    if weight is not None:
        settings["weight"] = weight
    keys = settings.setdefault("keys", [])
    names = {str(one.get("name")) for one in keys}
    chosen = name or next(f"key-{number}" for number in range(1, len(keys) + 2) if f"key-{number}" not in names)
    if chosen in names:
        raise UserError(f"--name {chosen}: tenant {tenant} has a key of this name; choose another, or remove the old one from the file")
    entry: dict[str, Any] = {"name": chosen, "sha256": hashlib.sha256(key.encode()).hexdigest()}
    keys.append(entry if priority is None else entry | {"priority": priority})


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise UserError(f"--file {path}: {error.strerror}") from None
    try:
        read_keys(text)
    except KeyFileError as error:
        raise UserError(f"--file {path} cannot be used: {error}; repair it first") from None
    found: dict[str, Any] = yaml.safe_load(text)
    return found


def _write(path: Path, text: str) -> None:
    """Replace the file atomically. Only its owner can read it."""
    fresh = path.with_name(f".{path.name}.new")
    try:
        with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(text)
        fresh.replace(path)
    except OSError as error:
        fresh.unlink(missing_ok=True)
        raise UserError(f"--file {path} cannot be written: {error.strerror}; no key was created") from None
