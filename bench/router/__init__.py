"""The router beside its peers: one core each, a mock worker and a load client in C on the others. `python -m bench.router`."""
