"""`fairlead serve [MODEL]`: a model on this machine without a manifest.

One worker serves alone. With `--replicas` above 1 it is a local cluster (`fairlead.local`) of workers, a router and Redis.
"""

from fairlead.local.containers import LOOPBACK

DEFAULT_PORT = 8000
DEFAULT_URL = f"http://{LOOPBACK}:{DEFAULT_PORT}"
"""Where `fairlead chat` looks without `--url`."""
