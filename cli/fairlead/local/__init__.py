"""Local mode: a small kubelet runs the manifest's objects as processes on loopback.

Reading order: `manifest` (the operator's models and `desired()`) → `workloads` and `containers` (Deployments to command lines with local
flags) → `kubelet` (starts and stops pods until the wanted ones run) → `pod` (restart, probes) → `process` (a process group that ends with
this process).
"""
