"""The operator: API types, desired state, server-side apply and status.

It imports `fairlead_common` and `fairlead_index`, and no other package of Fairlead.
"""
