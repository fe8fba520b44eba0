"""Local mode: a small kubelet runs the manifest's objects as processes on loopback.

Reading order: `manifest` (the operator's models and `desired()`) → `pods` (Deployments to pod specs with local flags) → `kubelet`
(starts and stops pods until the wanted ones run) → `pod` (restart, probes) → `process` (one process group that ends with us).
"""
