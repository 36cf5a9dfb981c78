"""Onestem's laboratory: benchmarks, the papers' experiments, and other engines beside it."""
