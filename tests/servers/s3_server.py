"""A real S3 server on loopback: moto's, in its own environment in the user's cache (`make s3-server`).

The environment is separate because moto brings boto3, whose pins conflict with libraries that the operator wants newer. A machine without a
package index skips the tests.
"""

import subprocess
import sys
import urllib.request
from pathlib import Path
from types import TracebackType

import obstore
from obstore.store import S3Store
from tests.own_environment import OwnEnvironment

SERVE = """
import sys, logging
logging.disable(logging.INFO)
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
server.start()
print("port", server.get_host_and_port()[1], flush=True)
sys.stdin.read()
server.stop()
"""


ENVIRONMENT = OwnEnvironment("s3-server", Path(__file__).parent / "s3_pins.txt")
install = ENVIRONMENT.install


class S3Server:
    """Accepts any key; create a bucket first."""

    def __enter__(self) -> "S3Server":
        command = [ENVIRONMENT.python, "-c", SERVE]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert self._process.stdout is not None
        port = next(line for line in self._process.stdout if line.startswith("port ")).split()[1]
        self.url = f"http://127.0.0.1:{port}"
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._process.communicate(timeout=20)

    def make(self, bucket: str) -> None:
        urllib.request.urlopen(urllib.request.Request(f"{self.url}/{bucket}", method="PUT"), timeout=20).close()

    def put(self, bucket: str, path: str, data: bytes) -> None:
        options = {"access_key_id": "a", "secret_access_key": "b", "region": "us-east-1", "endpoint": self.url}
        obstore.put(S3Store(bucket, client_options={"allow_http": True}, **options), path, data)


if __name__ == "__main__":
    problem = install()
    print(
        f"the S3 server could not be installed, tests skip it: {problem}" if problem else f"S3 server: {ENVIRONMENT.folder}",
        file=sys.stderr,
    )
