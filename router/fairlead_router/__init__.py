"""One endpoint for each InferenceService: match, score, reserve, proxy.

Imports `fairlead_index` and no other room, and no torch.
"""
