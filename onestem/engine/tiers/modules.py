"""Modules below KV memory: copied out when they are computed, copied back instead of computed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np

from onestem.cache import ModuleRun
from onestem.engine.tiers.copies import Part
from onestem.engine.tiers.stores import TierStores

__all__ = ["ModuleTiers", "module_name"]


def module_name(identity: str, salt: str, key: object) -> str:
    """What a module of a model is called in every store."""
    return hashlib.blake2b(ascii((identity, salt, key)).encode(), digest_size=16).hexdigest()


class ModuleTiers:
    """What host memory and disk hold of the modules of one engine.

    Args:
        identity: what keys and values depend on besides a module's key.
    """

    def __init__(self, stores: TierStores, identity: str) -> None:
        self._stores = stores
        self._identity = identity

    def has(self, run: ModuleRun) -> bool:
        """Whether a module is kept, and copying it beats computing it."""
        stores, name = self._stores, self._name(run)
        if not run.kept:
            return False
        return stores.on_host(name) or (
            stores.on_disk(name) and stores.disk_pays(name, len(run.tokens))
        )

    def prefetch(self, modules: Iterable[tuple[str, object, int]]) -> None:
        """Begin to read modules (salt, key, tokens) from the disk that will be wanted."""
        self._stores.read(
            [(module_name(self._identity, salt, key), count) for salt, key, count in modules]
        )

    def load(self, run: ModuleRun) -> bool:
        """Copy a module to its run's pages before the next step; False if no tier has it whole."""
        count = len(run.tokens)
        name = self._name(run)
        kv = self._stores.take(name, count)
        if kv is None:
            return False
        self._stores.note_use(name, count)
        if self._stores.host is not None:
            self._stores.host.touch(name)  # as if it left KV memory now: nobody tells when it does
        self._stores.copies.into([Part(kv, 0, run.slots(0, count))]).join()
        return True

    def save_complete(self, modules: Iterable[ModuleRun | None]) -> None:
        """Keep those modules of a step's chunks that are complete with it."""
        self._stores.save(
            (self._name(run), np.array(run.tokens, np.int32), run.slots(0, len(run.tokens)), 0)
            for run in modules
            if run is not None and run.kept and run.complete and run.pages
        )

    def _name(self, run: ModuleRun) -> str:
        """Of its salt and key; the rest of a run's name is of one process."""
        if isinstance(run.name, tuple):
            salt, key, *_ = run.name
            return module_name(self._identity, salt, key)
        return module_name(self._identity, "", run.name)
