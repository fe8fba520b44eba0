"""KV cache bookkeeping: which pages exist, which leases hold them, and which prefixes they contain. The KV itself belongs to the model.

It uses no torch, no clock and no I/O, and imports only `messages` and the index's hash functions.
"""
