"""From events to writes: reflectors wake one reconciler per service, which computes `desired` from the cache and applies the difference."""
