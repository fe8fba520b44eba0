"""Prometheus metrics of one replica, under the names of Fairlead or vLLM."""
