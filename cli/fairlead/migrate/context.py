"""What the sources share beside the draft: the other objects of the input, and objects that are left out."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fairlead.migrate.fields import Fields

SEVERAL_PODS = "a replica has several pods: write its InferenceService by hand, with spec.engine.nodes and runtime Fairlead"


class OtherWorkload(Exception):
    """The object is left out, because it runs something else than vLLM. The message says what to do."""


@dataclass
class Context:
    """All objects of the input. `used`: those that were read for another one."""

    objects: list[Mapping[str, Any]]
    used: set[int] = field(default_factory=set)

    def find(self, kinds: tuple[str, ...], matches: Callable[[Fields], bool], namespace: Any) -> list[Fields]:
        """Return the objects of these kinds in the namespace that match."""
        found = []
        for number, one in enumerate(map(Fields, self.objects)):
            own = one.look("metadata.namespace")
            if one.look("kind") in kinds and (own or namespace) == (namespace or own) and matches(one):
                self.used.add(number)
                found.append(one)
        return found
