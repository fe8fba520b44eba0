"""From the engine's KV events to the index. Reading order: `events` (wire format), `blocks`, `follower`, `publisher`."""
