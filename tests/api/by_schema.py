"""Requests that schemathesis generates from the OpenAPI document, to a worker and through a router.

python -m tests.api.by_schema --examples 100 --seed 1

`fuzz.py` covers what a document does not say (grammars, conversations, clients that disconnect, bytes that are no HTTP) and looks for
leaks; this one covers every operation, every field and every bound, valid and invalid. It has its own environment, because it brings twenty
packages.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.api.fleet import Pair
from tests.api.fuzz import ROUTER_FLAGS, WORKER_FLAGS
from tests.own_environment import OwnEnvironment

ENVIRONMENT = OwnEnvironment("schemathesis", Path(__file__).parent / "schemathesis" / "requirements.txt")
SECONDS = 3600


def check(url: str, examples: int, seed: int) -> subprocess.CompletedProcess[str]:
    """Return its report. The exit status is not 0 after a 5xx, a broken connection, or an answer that took a minute."""
    command = [ENVIRONMENT.folder / "bin" / "schemathesis", "run", f"{url}/openapi.json", "--seed", str(seed), "-n", str(examples)]
    command += ["--checks", "not_a_server_error", "--phases", "examples,coverage,fuzzing", "--continue-on-failure", "--no-shrink"]
    # One thread: before 3.11.8, Python's `ast` raises SystemError if two threads use it (python/cpython#106905), and hypothesis does.
    command += ["--workers", "1", "--request-timeout", "60", "--warnings", "off", "--no-color"]
    with tempfile.TemporaryDirectory() as folder:  # it writes what it has seen into the working folder
        return subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=SECONDS)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=100, help="of each operation, beside those at its bounds")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    if problem := ENVIRONMENT.install():
        print(f"schemathesis cannot be installed: {problem}")
        return 1
    failed = 0
    with tempfile.TemporaryDirectory() as folder, Pair(Path(folder), *WORKER_FLAGS, router_flags=ROUTER_FLAGS) as pair:
        for name, url in zip(("worker", "router"), pair.urls, strict=True):
            done = check(url, arguments.examples, arguments.seed)
            failed += done.returncode != 0 or not pair.alive
            counts = [line.strip() for line in done.stdout.splitlines() if " generated" in line]
            print(f"{name}: {done.stdout if done.returncode else counts[0]}")
        held = pair.held()
        if held["pages"] or held["requests"]:
            failed += 1
            print(f"leaked: {held}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
