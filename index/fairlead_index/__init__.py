"""The shared language of the rooms: prompts to tokens, tokens to block hashes, and the Redis index of who holds which block.

Imports no other room.
"""
