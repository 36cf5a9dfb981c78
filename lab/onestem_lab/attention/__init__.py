"""Benchmark of attention: timed steps, their floors, and other implementations beside ours."""
