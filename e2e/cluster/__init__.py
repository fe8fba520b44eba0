"""A real Kubernetes for tests: the caller's, kind's, or one on this machine. See `Cluster.acquire` and `python -m e2e.cluster --help`."""

from .cluster import Cluster

__all__ = ["Cluster"]
