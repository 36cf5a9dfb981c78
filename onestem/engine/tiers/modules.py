"""Modules below KV memory: copied out when they are computed, copied back instead of computed."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterable

import numpy as np

from onestem.cache import ModuleRun
from onestem.engine.tiers.copies import Part
from onestem.engine.tiers.stores import TierStores
from onestem.request import RequestMetrics


def module_name(identity: str, salt: str, key: object, position: int) -> str:
    """What a module of a model, stored at a position, is called in every store."""
    name = ascii((identity, salt, key, position))
    return hashlib.blake2b(name.encode(), digest_size=16).hexdigest()


class ModuleTiers:
    """What host memory and disk hold of the modules of one engine.

    Args:
        identity: what keys and values depend on besides a module's key.
    """

    def __init__(self, stores: TierStores, identity: str) -> None:
        self._stores = stores
        self._identity = identity
        self._places: dict[Hashable, int] = {}  # by name: the position that was kept last

    def has(self, run: ModuleRun) -> bool:
        """Whether a module is kept, and copying it beats computing it."""
        return run.kept and self._place_of(run) is not None

    def _place_of(self, run: ModuleRun) -> int | None:
        """A position at which a module that is to be stored is kept; None: it had better be
        computed."""
        stores, count = self._stores, len(run.tokens)
        for position in (run.position, self._places.get(run.name, run.position)):
            name = self._name(run.name, position)
            if stores.on_host(name) or (stores.on_disk(name) and stores.disk_pays(name, count)):
                return position
        return None

    def prefetch(self, modules: Iterable[tuple[Hashable, int, int]]) -> None:
        """Begin to read modules (name, position, tokens) from the disk that will be wanted."""
        self._stores.read([
            (self._name(name, self._places.get(name, position)), count)
            for name, position, count in modules
        ])  # fmt: skip

    def load(self, run: ModuleRun, metrics: RequestMetrics) -> bool:
        """Copy a module to its run's pages before the next step, for the request with these
        `metrics`; False if no tier has it whole."""
        count, position = len(run.tokens), self._place_of(run)
        if position is None:
            return False
        name = self._name(run.name, position)
        kv = self._stores.take(name, count)
        if kv is None:
            return False
        self._stores.note_use(name, count, metrics)
        if self._stores.host is not None:
            self._stores.host.touch(name)  # as if it left KV memory now: nobody tells when it does
        run.store_at(position)
        self._stores.copies.into([Part(kv, 0, run.slots(0, count))]).join()
        return True

    def save_complete(self, modules: Iterable[ModuleRun | None]) -> None:
        """Keep those modules of a step's chunks that are complete with it."""
        complete = [run for run in modules if run and run.kept and run.complete and run.pages]
        self._places.update((run.name, run.position) for run in complete)
        self._stores.save(
            (
                self._name(run.name, run.position),
                np.array(run.tokens, np.int32),
                run.slots(0, len(run.tokens)),
                0,
            )
            for run in complete
        )

    def _name(self, name: Hashable, position: int) -> str:
        """Of a run's name the salt and the key count; the rest is of one process."""
        salt, key = name[:2] if isinstance(name, tuple) else ("", name)
        return module_name(self._identity, salt, key, position)
