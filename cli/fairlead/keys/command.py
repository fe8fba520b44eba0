"""`fairlead keys new TENANT` prints a new API key once, and its entry in the key file. `fairlead keys check FILE` checks one.

See docs/guides/keys-and-tenants.md.
"""

import argparse
import hashlib
import os
import re
import secrets
import sys
from pathlib import Path
from typing import Any

import yaml

from fairlead.errors import UserError
from fairlead_router.tenancy.tenants import KeyFileError, read_keys

PREFIX = "fl-"
"""Makes a key that was leaked easy to find."""
NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("keys", help="API keys of tenants, for a service's Secret")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    new = actions.add_parser("new", help="make a key: it is printed once, its hash goes into the file")
    new.add_argument("tenant", metavar="TENANT")
    new.add_argument(
        "-f", "--file", type=Path, default=Path("keys.yaml"), metavar="FILE", help="key file, made if absent (default keys.yaml)"
    )
    new.add_argument("--name", metavar="NAME", help="name of the key, shown in logs (default: key-N)")
    new.add_argument(
        "--priority", type=int, metavar="N", help="most urgent priority of its requests, lower goes first (default: the tenant's)"
    )
    new.add_argument("--tokens-per-minute", type=int, metavar="N", help="token rate of the tenant, all its keys together")
    new.add_argument("--weight", type=float, metavar="W", help="share of the tenant where there is not enough for all (default 1)")
    new.set_defaults(run=run_new)
    check = actions.add_parser("check", help="say whether routers would use a file, and what is in it")
    check.add_argument("file", type=Path, metavar="FILE")
    check.set_defaults(run=run_check)


def run_new(arguments: argparse.Namespace) -> int:
    """The key goes to stdout alone, so that it can be piped; what to do with the file to stderr."""
    found = _read(arguments.file)
    key = PREFIX + secrets.token_urlsafe(32)
    add_key(found, arguments.tenant, key, arguments.name, arguments.priority, arguments.tokens_per_minute, arguments.weight)
    text = yaml.safe_dump(found, sort_keys=False)
    try:
        read_keys(text.encode())
    except KeyFileError as error:
        raise UserError(f"{arguments.file} would not be usable: {error}") from None
    _write(arguments.file, text)
    print(key)
    print(
        f"# {arguments.file} has its hash; the key itself is nowhere but here. To give the file to a service's routers:\n"
        f"#   kubectl create secret generic NAME-keys --from-file=keys.yaml={arguments.file}"
        " --dry-run=client -o yaml | kubectl apply -f -\n"
        "# and in the InferenceService: spec.access.keysSecretRef: {name: NAME-keys}",
        file=sys.stderr,
    )
    return 0


def run_check(arguments: argparse.Namespace) -> int:
    try:
        callers = read_keys(arguments.file.read_bytes())
    except OSError as error:
        raise UserError(f"{arguments.file}: {error.strerror}") from None
    except KeyFileError as error:
        raise UserError(f"{arguments.file} cannot be used: {error}") from None
    tenants = {caller.tenant.name: caller.tenant for caller in callers.values()}
    for name, tenant in sorted(tenants.items()):
        rate = f"{tenant.rate * 60:.0f} tokens a minute" if tenant.rate else "no token rate"
        keys = sorted(f"{caller.key} (priority {caller.priority})" for caller in callers.values() if caller.tenant.name == name)
        print(f"{name}: {rate}, weight {tenant.weight:g}; {', '.join(keys)}")
    return 0


def add_key(
    found: dict[str, Any],
    tenant: str,
    key: str,
    name: str | None = None,
    priority: int | None = None,
    tokens_per_minute: int | None = None,
    weight: float | None = None,
) -> None:
    """Put a key's hash into the contents of a key file. UserError for names that it could not have."""
    if not NAME.fullmatch(tenant):
        raise UserError(f"tenant {tenant!r}: letters, digits, '.', '_' and '-', at most 63, a letter or digit at both ends")
    found.setdefault("saltSecret", secrets.token_urlsafe(32))
    said = found.setdefault("tenants", {}).setdefault(tenant, {"keys": []})
    if tokens_per_minute is not None:
        said["tokensPerMinute"] = tokens_per_minute
    if weight is not None:
        said["weight"] = weight
    keys = said.setdefault("keys", [])
    names = {str(one.get("name")) for one in keys}
    chosen = name or next(f"key-{number}" for number in range(1, len(keys) + 2) if f"key-{number}" not in names)
    if chosen in names:
        raise UserError(f"--name {chosen}: tenant {tenant} has a key of this name; choose another, or take the old one out of the file")
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
    """Readable by its owner alone, and never half written."""
    fresh = path.with_name(f".{path.name}.new")
    try:
        with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(text)
        fresh.replace(path)
    except OSError as error:
        fresh.unlink(missing_ok=True)
        raise UserError(f"--file {path} cannot be written: {error.strerror}; no key was made") from None
