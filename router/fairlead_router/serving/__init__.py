"""Request lifecycle: admission, queueing, proxying, retries and charging."""
