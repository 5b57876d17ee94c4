"""The benchmarks: one module per question. `python -m benchmarks --help` lists them."""
