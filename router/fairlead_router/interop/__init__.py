"""Optional integrations: endpoint picker, redirects, index queries, and metric names of other stacks.

Nothing else depends on them.
"""
