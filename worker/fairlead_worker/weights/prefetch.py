"""`fairlead-prefetch URI …`: download models into the cache, before a worker needs them. The operator runs it in a Job.

A worker that starts meanwhile waits for the same lock, and loads what is there. Without torch, so a small pod without a GPU suffices.
"""

import argparse
import logging
import sys
from pathlib import Path

from huggingface_hub.constants import HF_HOME

from fairlead_common.telemetry.logs import configure_logging
from fairlead_worker.errors import ModelLoadError
from fairlead_worker.weights.cache import ModelCache
from fairlead_worker.weights.uri import resolve

log = logging.getLogger(__name__)


def main(arguments: list[str] | None = None) -> int:
    """Download each model and return the exit status. The last line of stderr names the cause of a failure."""
    parser = argparse.ArgumentParser("fairlead-prefetch", description="Download models into a cache.")
    parser.add_argument("models", nargs="+", metavar="URI", help="hf://, s3:// or gs:// model.")
    parser.add_argument("--adapter", action="append", default=[], metavar="URI", help="LoRA adapter. May be repeated.")
    parser.add_argument("--cache", type=Path, default=Path(HF_HOME), metavar="FOLDER", help="Folder of the cache.")
    options = parser.parse_args(arguments)
    configure_logging("INFO", "text", sys.stderr, "%(asctime)s %(levelname)s %(name)s: %(message)s")
    cache = ModelCache(options.cache)
    wanted = [(uri, "config.json") for uri in options.models] + [(uri, "adapter_config.json") for uri in options.adapter]
    for uri, required_file in wanted:
        try:
            folder = resolve(uri, _Log(uri), cache, required_file=required_file)
        except ModelLoadError as error:
            log.error("%s", error)
            return 1
        log.info("%s is in %s", uri, folder)
    return 0


class _Log:
    """Logs the progress in steps of ten percent."""

    def __init__(self, uri: str) -> None:
        self._uri, self._last = uri, ("", -10)

    def __call__(self, phase: str, percent: int, done: int = 0, total: int = 0, note: str = "") -> None:
        step = (phase, percent - percent % 10)
        if step != self._last:
            self._last = step
            log.info("%s: %s %d %%%s", self._uri, phase, percent, f" ({note})" if note else "")


if __name__ == "__main__":
    sys.exit(main())
