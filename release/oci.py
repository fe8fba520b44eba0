"""Chart and image contexts as OCI artifacts in a layout: a folder that skopeo, oras and others push to any registry."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from release.archives import IMAGES
from release.tree import Tree

MANIFEST = "application/vnd.oci.image.manifest.v1+json"
CHART_CONFIG = "application/vnd.cncf.helm.config.v1+json"
CHART_LAYER = "application/vnd.cncf.helm.chart.content.v1.tar+gzip"
CONTEXT_CONFIG = "application/vnd.fairlead.image-context.config.v1+json"
CONTEXT_LAYER = "application/vnd.fairlead.image-context.v1.tar+gzip"
SBOM_LAYER = "application/vnd.cyclonedx+json"
_ANNOTATION = "org.opencontainers.image"


@dataclass(slots=True)
class Layout:
    """An OCI image layout. Its blobs have their digests as names."""

    folder: Path
    manifests: dict[str, str] = field(default_factory=dict)
    """Digest of each artifact's manifest, by its repository, such as `charts/fairlead`."""
    _index: list[dict[str, Any]] = field(default_factory=list)

    def add(self, repository: str, config: tuple[str, Any], layers: Sequence[tuple[str, Path]], annotations: dict[str, str]) -> None:
        """Add an artifact. `config` and `layers` have their media types; each layer is a file."""
        manifest = {
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "config": self._blob(config[0], encode(config[1])),
            "layers": [self._blob(kind, path.read_bytes()) | {"annotations": {f"{_ANNOTATION}.title": path.name}} for kind, path in layers],
            "annotations": {f"{_ANNOTATION}.{key}": value for key, value in annotations.items()},
        }
        described = self._blob(MANIFEST, encode(manifest))
        self.manifests[repository] = str(described["digest"])
        self._index.append(described | {"annotations": {f"{_ANNOTATION}.ref.name": repository}})

    def close(self) -> None:
        """Write the index."""
        (self.folder / "oci-layout").write_bytes(encode({"imageLayoutVersion": "1.0.0"}))
        (self.folder / "index.json").write_bytes(encode({"schemaVersion": 2, "manifests": self._index}))

    def _blob(self, kind: str, content: bytes) -> dict[str, Any]:
        digest = hashlib.sha256(content).hexdigest()
        blobs = self.folder / "blobs" / "sha256"
        blobs.mkdir(parents=True, exist_ok=True)
        (blobs / digest).write_bytes(content)
        return {"mediaType": kind, "digest": f"sha256:{digest}", "size": len(content)}


def write_layout(tree: Tree, target: Path) -> Layout:
    """Write a layout of the chart and of each image's context with its bill of materials, all of which are in `target`."""
    layout = Layout(target / "oci")
    created = datetime.fromtimestamp(tree.epoch, UTC).isoformat().replace("+00:00", "Z")
    common = {"created": created, "revision": tree.commit, "version": tree.version}
    chart = yaml.safe_load((tree.folder / "charts" / "fairlead" / "Chart.yaml").read_text())
    archive = target / f"fairlead-{tree.version}.tgz"
    layout.add("charts/fairlead", (CHART_CONFIG, chart), [(CHART_LAYER, archive)], common | {"title": "fairlead"})
    for image in IMAGES:
        context = target / f"context-{image}-{tree.version}.tar.gz"
        sbom = target / f"sbom-{image}-{tree.version}.cdx.json"
        layers = [(CONTEXT_LAYER, context), *([(SBOM_LAYER, sbom)] if sbom.exists() else [])]
        layout.add(f"contexts/{image}", (CONTEXT_CONFIG, {"image": image}), layers, common | {"title": context.name})
    layout.close()
    return layout


def encode(value: Any) -> bytes:
    """Return JSON without spaces and with sorted keys, so that equal values have equal digests."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
