"""The operator's own autoscaler: what routers report → how many workers are needed → the decision. Pure.

The Deployment's replicas are the state. The recommendations of the last minutes may be lost at any moment, which only delays a scale-down.
"""
