"""Imports what the commands import, and what transformers imports to read a tokenizer."""

from __future__ import annotations

import gc
from importlib import import_module

from onestem.engine.text.tokenizer import Tokenizer
from onestem.models.find import find_model

for name in ("onestem.bench", "onestem.cli.app", "onestem.jobs", "onestem_lab.cli"):
    import_module(name)
Tokenizer.from_directory(find_model("embedded"))
gc.collect()
gc.freeze()  # as it stays: commands that collect garbage need not look through it
