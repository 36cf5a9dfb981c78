"""Evaluation harnesses on Onestem."""
