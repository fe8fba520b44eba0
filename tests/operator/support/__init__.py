"""Servers, processes and manifests that the operator's tests share."""
