"""An image or artifact of a registry into the cache: one download for each digest, shared by all that start at the same time."""

import json
import os
import shutil
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from fairlead_worker.errors import ModelLoadError
from fairlead_worker.weights.cache import LockProgress, ModelCache, replace_json
from fairlead_worker.weights.oci.extract import place
from fairlead_worker.weights.oci.manifest import Layer, model_layers
from fairlead_worker.weights.oci.reference import OciModel
from fairlead_worker.weights.oci.registry import Registry, Unreachable
from fairlead_worker.weights.progress import Progress

LAYERS_AT_ONCE = 4
STEP_BYTES = 4 << 20
"""Bytes between two progress reports."""


def fetch(uri: str, source: OciModel, patterns: Sequence[str], cache: ModelCache, progress: Progress) -> Path:
    """Download the files of the model; return their folder. Raises ModelLoadError."""
    with cache.lock(uri, progress) as report, Registry(uri, source) as registry:
        folder = cache.folder(uri)
        pointer = folder.with_name(f"{folder.name}.digest.json")  # names and tags have dots: with_suffix would cut them
        try:
            digest, manifest = registry.manifest()
        except Unreachable as error:
            known = _read_json(pointer, "")
            if not known.startswith(source.at("")) or not cache.is_complete(known, cache.folder(known)):
                raise ModelLoadError(uri, f"the registry {source.registry} cannot be reached ({error})") from error
            report("download", 100, note=f"the registry cannot be reached, and {cache.folder(known)} is complete")
            return cache.folder(known) / source.folder
        content = source.at(digest)
        if content == uri:
            _complete(uri, registry, content, manifest, source, patterns, cache, report)
        else:
            with cache.lock(content, report) as shared:
                _complete(uri, registry, content, manifest, source, patterns, cache, shared)
        pointer.parent.mkdir(parents=True, exist_ok=True)
        replace_json(pointer, content)
        return cache.folder(content) / source.folder


def _complete(
    uri: str,
    registry: Registry,
    content: str,
    manifest: dict[str, object],
    source: OciModel,
    patterns: Sequence[str],
    cache: ModelCache,
    report: LockProgress,
) -> None:
    """Download and place the layers that are missing. `content`: the URI with the digest, under which the cache knows them."""
    root = cache.folder(content)
    if cache.is_complete(content, root):
        return
    # On a volume without locks, two workers must not write the same part.
    parts = root.with_name(f"{root.name}.parts{'' if report.is_exclusive else f'-{os.uname().nodename}-{os.getpid()}'}")
    if cache.is_damaged(content, root):
        shutil.rmtree(parts, ignore_errors=True)
        shutil.rmtree(root, ignore_errors=True)
    try:
        layers = model_layers(manifest, patterns, source.folder)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelLoadError(uri, f"its manifest is refused: {error}") from error
    for folder in (root, parts):
        folder.mkdir(parents=True, exist_ok=True)
    record = parts / "placed.json"
    placed: list[str] = _read_json(record, [])
    missing = [layer for number, layer in enumerate(layers) if _key(number, layer) not in placed]
    present = sum(path.stat().st_size for layer in missing if (path := parts / layer.digest).exists())
    cache.check_space(uri, sum(layer.size * (1 if layer.kind == "file" else 2) for layer in missing) - present)
    total = sum(layer.size for layer in layers)
    counter = _Counter(total - sum(layer.size for layer in missing), total, report)
    with ThreadPoolExecutor(LAYERS_AT_ONCE, thread_name_prefix="download") as threads:
        waiting = {
            layer.digest: threads.submit(registry.download, layer, parts / layer.digest, counter.add)
            for layer in {layer.digest: layer for layer in missing}.values()
        }
        try:
            for number, layer in enumerate(layers):
                if _key(number, layer) in placed:
                    continue
                waiting[layer.digest].result()
                again = any(later.digest == layer.digest for later in layers[number + 1 :])
                blob = parts / layer.digest
                if again:
                    blob = Path(shutil.copyfile(blob, parts / f"{layer.digest}.copy"))
                place(layer, blob, root, patterns, source.folder, lambda needed: cache.check_space(uri, needed))
                placed.append(_key(number, layer))
                replace_json(record, placed)
        except Unreachable as error:
            raise ModelLoadError(uri, f"the download failed: {error}") from error
        except ValueError as error:
            raise ModelLoadError(uri, str(error)) from error
        finally:
            counter.stop()
            threads.shutdown(wait=False, cancel_futures=True)
    cache.mark_complete(content, root)
    shutil.rmtree(parts, ignore_errors=True)


def _read_json(path: Path, default: Any) -> Any:
    """Return what `replace_json` wrote; `default` where there is no such file, or a volume lost its content."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return default
    return found if isinstance(found, type(default)) else default


def _key(number: int, layer: Layer) -> str:
    return f"{number} {layer.digest}"


class _Stopped(Exception):
    """Another layer failed."""


class _Counter:
    """Bytes received by all threads."""

    def __init__(self, done: int, total: int, report: Progress) -> None:
        self._done, self._total, self._report = done, total, report
        self._counting = threading.Lock()
        self._shown = -1
        self._stopped = False

    def stop(self) -> None:
        """End the downloads that still run, at their next piece."""
        self._stopped = True

    def add(self, count: int) -> None:
        if self._stopped:
            raise _Stopped
        with self._counting:
            self._done += count
            done = min(self._done, self._total)
            if done < self._total and done // STEP_BYTES == self._shown:
                return
            self._shown = done // STEP_BYTES
        self._report("download", 100 * done // max(1, self._total), done, self._total)
