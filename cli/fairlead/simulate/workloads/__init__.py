"""What the simulator replays: recorded traces and generated workloads."""
