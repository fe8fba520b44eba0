"""Local mode: the manifest's own objects, run as processes on loopback by a small kubelet.

The way of a manifest: `manifest` (the operator's models and `desired()`) → `pods` (Deployments to pod specs with local flags) → `kubelet`
(what should run against what runs) → `pod` (restart, probes) → `process` (one process group that cannot outlive us).
"""
