"""The benchmarks behind `tidegate bench NAME`: each measures, prints a table and writes JSON."""
