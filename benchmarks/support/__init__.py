"""What the benchmarks share: meter, limits, machine, report, engines."""
