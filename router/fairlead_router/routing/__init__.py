"""Routing policies: index-free ones, `PrefixAware` with the index or a mirror of it, its local fallback, and canaries."""
