"""KV pages and who owns them: the page pool, leases, the radix prefix cache, its events. No torch."""
