"""Secrets that the operator writes and never reads: its role does not allow get, list or watch.

There are two kinds, distinguished by Kubernetes' own field `immutable`:
- `build_random`: created once with random values, which the operator does not keep. A 409 means that it exists.
- `build_fixed`: server-side apply of values that the caller has.
"""

from base64 import b64encode
from collections.abc import Mapping

from fairlead_operator.api import InferenceService
from fairlead_operator.kube.kinds import SECRETS, make_child
from fairlead_operator.objects import Object

GENERATED = "<generated>"  # placeholder for a random value, which `secret_writer` generates: `desired` has no randomness


def build_random(service: InferenceService, name: str, component: str, *keys: str) -> Object:
    """Return an immutable Secret whose `keys` get random values of 256 bits when it is created."""
    return make_child(service, SECRETS, name, component, type="Opaque", immutable=True, data=dict.fromkeys(keys, GENERATED))


def build_fixed(service: InferenceService, name: str, component: str, data: Mapping[str, str]) -> Object:
    """Return a Secret with exactly `data`, updated when it changes."""
    return make_child(service, SECRETS, name, component, type="Opaque", data={key: encode(value) for key, value in data.items()})


def encode(value: str) -> str:
    """Return `value` in base64, for `data`. With `stringData`, server-side apply could not remove a key."""
    return b64encode(value.encode()).decode()
