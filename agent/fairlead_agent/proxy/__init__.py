"""HTTP between routers and the engine."""
