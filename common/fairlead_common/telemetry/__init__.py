"""What a process tells about itself while it runs: log lines and spans."""
