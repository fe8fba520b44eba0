"""What the agent knows about its engine: metrics, models, tokenizer, and the process in local mode."""
