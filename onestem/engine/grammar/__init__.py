"""Structured output: JSON schemas as masks over the next token."""
