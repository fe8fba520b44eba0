"""All causes of failure, by the headings of the docs' page. `docs/generate/causes.py` writes that page from these rows."""

from .creation import CREATION
from .images import CONTAINERS, IMAGES, VOLUMES
from .models import MODELS
from .nodes import NODES, SPECS
from .row import Row
from .scheduling import SCHEDULING
from .serving import OPTIONAL, ROLLOUTS, ROUTERS

TABLE: dict[str, tuple[Row, ...]] = {
    "No pod is created": CREATION,
    "A pod has no node": SCHEDULING,
    "The image is not pulled": IMAGES,
    "A container or volume is not set up": VOLUMES,
    "The model is not loaded": MODELS,
    "A worker ends or is not ready": CONTAINERS,
    "Nodes and controllers": NODES,
    "The spec cannot be followed": SPECS,
    "Rollouts and capacity": ROLLOUTS,
    "Routers and the index": ROUTERS,
    "Gateway, certificate, batch, download": OPTIONAL,
}
ROWS = [row for rows in TABLE.values() for row in rows]
