"""Kubernetes: API types, desired state, server-side apply, status.

Imports `fairlead_index` and no other room.
"""
