"""The waiting requests: their order by policy, by tenant and by priority."""
