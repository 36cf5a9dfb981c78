"""Rollouts for trainers of other libraries (docs/rollouts.md)."""
