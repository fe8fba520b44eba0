"""Other ways in and out: gateways that pick, clients that are redirected, questions to the index, others' metric names.

Each can be taken away without the router noticing.
"""
