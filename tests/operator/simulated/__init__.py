"""A cluster in memory with a clock of its own: an API, the Deployment and ReplicaSet controllers, a scheduler, kubelets, and our operator.

`on_apiserver/test_rollout_on_controllers.py` holds the Deployment controller to the real one where its binary is there.
"""
