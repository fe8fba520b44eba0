"""`GET /docs`: the OpenAPI document as one page of HTML.

FastAPI's own page loads its script from another host. Clusters often have no way to one, and so this page has no script.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment

_TEMPLATE = Path(__file__).with_name("docs.html")


def render(document: Mapping[str, Any]) -> bytes:
    """Return the page. Every text of the document is escaped."""
    return Environment(autoescape=True).from_string(_TEMPLATE.read_text()).render(document).encode()
