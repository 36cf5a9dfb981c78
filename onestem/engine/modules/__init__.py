"""Modules of prompts in PML, as the engine runs them."""
