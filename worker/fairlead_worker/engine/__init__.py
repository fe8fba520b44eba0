"""Scheduling: requests, step plans, budgets, the step loop. No torch, no clock, no I/O but the loop's channel."""
