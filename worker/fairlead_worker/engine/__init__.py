"""The step loop around the scheduler: messages in, steps, messages out."""
