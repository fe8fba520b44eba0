"""The messages with which a worker ends when it cannot load its model: from the worker's own code, in one process for all of them.

The hub and the store are HTTP servers that answer with the status in question.
"""

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

REMOTE = {"private": "hf://private/model", "gated": "hf://gated/model", "absent": "hf://absent/model", "limited": "hf://limited/model"}
REMOTE |= {"away": "hf://broken/model", "refused": "s3://refused/model", "asked": "s3://asked/model"}
LLAMA = {"model_type": "llama", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
LLAMA |= {"vocab_size": 16, "max_position_embeddings": 64}


def collect(folder: Path) -> dict[str, str]:
    """Return each error by its name. HF_ENDPOINT and AWS_ENDPOINT_URL lead to the stand-ins.

    The imports are here, since the process of the tests does not need torch.
    """
    from fairlead_worker.errors import AdapterError, ModelLoadError
    from fairlead_worker.lora.source import adapter_folder
    from fairlead_worker.model.loader import load_model
    from fairlead_worker.weights.cache import ModelCache
    from fairlead_worker.weights.uri import resolve

    cache = ModelCache(folder / "cache", "pod-a")

    def model(name: str, config: object, **files: bytes) -> str:
        home = folder / name
        home.mkdir()
        (home / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
        for file, content in files.items():
            (home / f"{file}.safetensors").write_bytes(content)
        return f"file://{home}"

    def fail(error: Exception) -> None:
        raise error

    (folder / "nothing").mkdir()
    read_only = cache.explain("hf://org/model", OSError(errno.EROFS, os.strerror(errno.EROFS)))
    actions: dict[str, Callable[[], Any]] = {name: partial(resolve, uri, cache=cache) for name, uri in REMOTE.items()}
    actions |= {
        "folder": lambda: resolve("file:///mnt/model/qwen"),
        "large": lambda: cache.check_space("hf://org/large", 1 << 60),
        "read-only": lambda: fail(read_only),
        "architecture": lambda: load_model(model("architecture", {"model_type": "perceiver"})),
        "incomplete": lambda: load_model(model("incomplete", LLAMA)),
        "damaged": lambda: load_model(model("damaged", LLAMA, model=b"\x08" + bytes(7) + b"not json")),
        "config": lambda: load_model(model("config", '{"model_type": "lla')),
        "length": lambda: load_model(model("length", LLAMA), max_model_len=128),
        "quantization": lambda: load_model(model("quantization", LLAMA), dtype="float16", quantization="int8"),
        "adapter": lambda: adapter_folder("sql", f"file://{folder / 'nothing'}"),
    }
    found = {}
    for name, action in actions.items():
        try:
            action()
        except (ModelLoadError, AdapterError) as error:
            found[name] = str(error)
    return found


class WorkerErrors:
    """Starts `collect` in a process of its own; `get` waits for it."""

    def __init__(self, folder: Path, hub: str, store: str) -> None:
        self._folder, self._hub, self._store = folder, hub, store
        pool = ThreadPoolExecutor(1)
        self._found: Future[dict[str, str]] = pool.submit(self._run)
        pool.shutdown(wait=False)

    def get(self, name: str) -> str:
        found = self._found.result(300)
        assert name in found, f"no error {name!r}; there are: {', '.join(found)}"
        return found[name]

    def _run(self) -> dict[str, str]:
        keep = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "AWS_"))}
        environment = {"HF_ENDPOINT": self._hub, "HF_HOME": str(self._folder / "home"), "AWS_ENDPOINT_URL": self._store}
        environment |= {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_REGION": "us-east-1"}
        environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        command = [sys.executable, __file__, str(self._folder)]
        done = subprocess.run(command, env={**keep, **environment}, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return dict(json.loads(done.stdout.splitlines()[-1]))


if __name__ == "__main__":
    print(json.dumps(collect(Path(sys.argv[1]))))
