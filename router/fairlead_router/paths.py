"""The router's own paths, and the methods of each. A request that changes state is never a GET."""

import re
from collections.abc import Mapping

from fairlead_common.protocols.paths import COMPUTED, TOKENIZED
from fairlead_router.interop import queries
from fairlead_router.interop.score_page import PATH as SCORE
from fairlead_router.serving.demand import PATH as DEMAND
from fairlead_router.serving.probe import PATH as PROBE

OPENAPI = "/openapi.json"
REFERENCE = frozenset((OPENAPI, "/docs"))
"""Proxied: the workers own the schema of requests."""
STORED = "/v1/responses/"
_ID = "resp_[0-9a-z_]{1,64}"
"""Ids of stored responses have one spelling, so that every server reads the same path."""
MODELS, MODEL = "/v1/models", "/v1/models/"
ON_BOTH = frozenset(("/health", "/ready", "/version"))
ADMIN = frozenset(("/metrics", "/fairlead/workers", "/fairlead/split", SCORE, PROBE, DEMAND))
"""Paths that only `--admin-port` serves where that flag is given. Else they need a key where clients need one."""
POSTED = frozenset((*COMPUTED, *TOKENIZED, *queries.PATHS))
"""Paths of requests with a body."""
QUERIES = frozenset((*queries.PATHS, SCORE))
SAFE = ("GET", "HEAD")
"""Methods that change no state (RFC 9110, 9.2.1): every web page can send them, also without an Origin header."""
METHODS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys((*POSTED, SCORE), ("POST",)),
    **dict.fromkeys(REFERENCE, ("GET",)),
    **dict.fromkeys((*ON_BOTH, "/metrics", "/fairlead/workers", "/fairlead/split", PROBE, MODELS), SAFE),
    DEMAND: (*SAFE, "POST"),
}
"""Methods of each path."""
PATTERNS: Mapping[str, tuple[str, ...]] = {
    rf"{MODEL}.*": SAFE,
    STORED + _ID: ("GET", "DELETE"),
    rf"{STORED}{_ID}/input_items": ("GET",),
    rf"{STORED}{_ID}/cancel": ("POST",),
}
"""Methods of the paths that match a regular expression. Files and batches are the batch server's."""


def methods_of(path: str) -> tuple[str, ...]:
    """Return the methods of a path; empty for an unknown path."""
    if (found := METHODS.get(path)) is not None:
        return found
    return next((methods for pattern, methods in PATTERNS.items() if re.fullmatch(pattern, path, re.DOTALL)), ())
