"""From events to writes: watches wake one loop for each service; the loop reads, computes `desired`, and applies the difference."""
