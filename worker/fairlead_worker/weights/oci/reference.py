"""`oci://IMAGE[:TAG][@DIGEST][#FOLDER][/FILE.gguf]`, with a container runtime's defaults, so that one URI works here and in a cluster."""

import os
import re
from dataclasses import dataclass
from ipaddress import ip_address

from fairlead_worker.errors import ModelLoadError

INSECURE = "FAIRLEAD_INSECURE_REGISTRIES"
"""Variable with the registries, HOST[:PORT] with commas, that are asked without TLS."""
DOCKER_HUB = "docker.io"
_SHAPE = re.compile(
    r"(?P<name>[A-Za-z0-9][A-Za-z0-9._/-]*?(?::[0-9]+(?=/)[a-z0-9._/-]*)?)"
    r"(:(?P<tag>\w[\w.-]{0,127}))?(@(?P<digest>sha256:[0-9a-f]{64}))?(#(?P<folder>[A-Za-z0-9._/-]+))?"
)


@dataclass(frozen=True, slots=True)
class OciModel:
    """An image or artifact in a registry. `folder`: the part of it with the model; empty: its root, or /models."""

    registry: str
    repository: str
    reference: str
    """Tag, or digest with `sha256:`."""
    folder: str
    file: str = ""
    """A GGUF file in that folder."""

    @property
    def base_url(self) -> str:
        host = "registry-1.docker.io" if self.registry == DOCKER_HUB else self.registry
        return f"{'http' if is_plain(self.registry) else 'https'}://{host}/v2/{self.repository}"

    def at(self, digest: str) -> str:
        """Return the URI of this content, whatever tag led to it."""
        inside = "/".join(filter(None, (self.folder, self.file)))
        return f"oci://{self.registry}/{self.repository}@{digest}" + (f"#{inside}" if inside else "")


def parse_oci(uri: str) -> OciModel:
    """Parse an `oci://` URI. A digest wins over a tag. Raises ModelLoadError."""
    found = _SHAPE.fullmatch(uri.removeprefix("oci://"))
    if found is None:
        raise ModelLoadError(uri, "not an image; write oci://REGISTRY/REPOSITORY:TAG[#FOLDER] or oci://REGISTRY/REPOSITORY@sha256:DIGEST")
    folder = (found["folder"] or "").strip("/")
    if ".." in folder.split("/"):
        raise ModelLoadError(uri, f"#{folder} leaves the image; name a folder inside it")
    registry, slash, rest = found["name"].partition("/")
    if not slash or not (set(registry) & set(".:") or registry == "localhost"):
        registry, rest = DOCKER_HUB, found["name"] if slash else f"library/{found['name']}"
    file = ""
    if folder.endswith(".gguf"):
        folder, _, file = folder.rpartition("/")
    return OciModel(registry, rest, found["digest"] or found["tag"] or "latest", folder, file)


def is_plain(registry: str) -> bool:
    """Return whether a registry (HOST[:PORT]) is asked without TLS: one on loopback, or one that the user names."""
    named = {name.strip() for name in os.environ.get(INSECURE, "").split(",")}
    host = registry.rpartition(":")[0] if re.search(r":\d+$", registry) else registry
    try:
        return registry in named or host == "localhost" or ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
