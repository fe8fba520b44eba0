"""Where model files come from: the hub, buckets, volumes, and the cache of downloads."""
