"""KV cache bookkeeping: which pages exist, which leases hold them, and which prefixes they contain. Integers only: the model has the KV.

Imports nothing of ours but `messages`; no torch, no clock, no I/O.
"""
