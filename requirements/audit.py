"""`make audit`: are there known vulnerabilities in what the images are made of?

Exit status: 0 none known, or no source of advisories answered (the output says which: an empty mirror must not look like a clean result);
1 there are some. A finding that does not concern us is written into requirements/audit-accepted.txt, one ID a line, with why.
"""

import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PINS = ("control", "worker")  # what the images hold; dev.txt has them too, and development tools, which no image contains
TOOL = "pip-audit==2.9.0"
SERVICES = ("pypi", "osv")  # asked in this order
SECONDS = 300  # for one file and one service


class Unreachable(Exception):
    """No answer from an advisory service; the message says which, and its last words."""


def asked(pins: Path, service: str, accepted: Iterable[str]) -> list[dict[str, Any]]:
    """Each dependency with its `vulns`, or a `skip_reason`. Raises Unreachable."""
    ignored = [word for name in accepted for word in ("--ignore-vuln", name)]
    flags = ["--require-hashes", "--disable-pip", "--format=json", "--progress-spinner=off", f"--vulnerability-service={service}"]
    uv = Path(sys.executable).parent / "uv"
    try:
        command = [str(uv), "tool", "run", "--from", TOOL, "pip-audit", "-r", str(pins), *flags, *ignored]
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
        found: list[dict[str, Any]] = json.loads(done.stdout)["dependencies"]
    except (subprocess.TimeoutExpired, OSError) as error:
        raise Unreachable(f"{service}: {error}") from None
    except (ValueError, KeyError):
        raise Unreachable(f"{service}: {(done.stderr.strip().splitlines() or ['no answer'])[-1][:120]}") from None
    return found


def judged(pins: Path, accepted: Iterable[str]) -> list[dict[str, Any]]:
    """The first service's answer that speaks of any dependency. Raises Unreachable when none does."""
    heard = []
    for service in SERVICES:
        try:
            found = asked(pins, service, accepted)
        except Unreachable as error:
            heard.append(str(error))
            continue
        if any("skip_reason" not in one for one in found):
            return found
        heard.append(f"{service}: knows none of {len(found)} packages ({found[0]['skip_reason'] if found else 'empty list'})")
    raise Unreachable("; ".join(heard))


def accepted_ids(text: str) -> list[str]:
    lines = (line.partition("#")[0].split() for line in text.splitlines())
    return [words[0] for words in lines if words]


def main() -> int:
    accepted = accepted_ids((HERE / "audit-accepted.txt").read_text())
    vulnerable = False
    for name in PINS:
        pins = HERE / f"{name}.txt"
        try:
            found = judged(pins, accepted)
        except Unreachable as error:
            print(f"{name}: NOT AUDITED, no advisory service answers here: {error}")
            continue
        skipped = [one["name"] for one in found if "skip_reason" in one]
        known = [(one["name"], one["version"], flaw) for one in found for flaw in one.get("vulns", [])]
        print(f"{name}: {len(found) - len(skipped)} packages audited, {len(known)} known vulnerabilities")
        if skipped:
            print(f"  not audited: {', '.join(skipped)}")
        for package, version, flaw in known:
            print(f"  {package} {version}: {flaw['id']}, fixed in {', '.join(flaw['fix_versions']) or 'no release'}")
        vulnerable = vulnerable or bool(known)
    if vulnerable:
        print("raise the pins (make requirements), or accept a finding with its reason in requirements/audit-accepted.txt")
    return 1 if vulnerable else 0


if __name__ == "__main__":
    sys.exit(main())
