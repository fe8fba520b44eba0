"""Router of one InferenceService: match, score, reserve, proxy.

Imports `fairlead_index` and `fairlead_common`, no other package of Fairlead, and no torch.
"""
