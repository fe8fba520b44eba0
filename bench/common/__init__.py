"""What several benchmarks use: the report, interleaved runs, engines in this process, models with random weights."""
