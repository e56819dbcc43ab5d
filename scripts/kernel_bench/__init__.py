"""What scripts/bench_kernels.py times: one module for each operation, and how they are timed."""
