"""KV cache bookkeeping: which pages exist, who holds them, which prefixes they hold. Integers only: the KV itself is the model's.

Imports nothing of ours but `messages`; no torch, no clock, no I/O.
"""
