"""The operator's own autoscaler, all of it pure: what routers report → how many workers are needed → what is decided. The Deployment's
replicas are the state; what is remembered beside them (a few minutes of needs) may be lost at any moment, and only delays a scale-down.
"""
