"""All tables and figures, by name."""

from __future__ import annotations

import difflib

from onestem.errors import ConfigError
from onestem_lab.papers import batchllm, hydragen, promptcache, relay
from onestem_lab.papers.experiment import Experiment

__all__ = ["EXPERIMENTS", "find"]

PAPERS = (relay, hydragen, batchllm, promptcache)
EXPERIMENTS = {one.name: one for paper in PAPERS for one in paper.EXPERIMENTS}
NAMES = {name: one for one in EXPERIMENTS.values() for name in one.names}


def find(name: str) -> Experiment:
    """An experiment by one of its names.

    Raises:
        ConfigError: no experiment has this name.
    """
    if name in NAMES:
        return NAMES[name]
    near = difflib.get_close_matches(name, NAMES, 1)
    hint = f"did you mean {near[0]}?" if near else "`onestem bench paper` lists all names"
    raise ConfigError(f"there is no table or figure {name!r}: {hint}")
