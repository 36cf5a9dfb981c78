"""What an engine has below KV memory: one pair of stores for its modules and its runs."""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Self

from onestem.cache import PrefixCache
from onestem.cache.host import HostStore
from onestem.cache.storage import DiskStore
from onestem.engine.sequence import Chunk
from onestem.engine.tiers.copies import KvCopies
from onestem.engine.tiers.modules import ModuleTiers
from onestem.engine.tiers.prefixes import PrefixTiers
from onestem.engine.tiers.stores import TierStats, TierStores
from onestem.errors import RankError


@dataclass(eq=False, repr=False)
class KvTiers:
    """Host memory and a folder for keys and values."""

    stores: TierStores
    modules: ModuleTiers
    prefixes: PrefixTiers

    @classmethod
    def make(
        cls,
        copies: KvCopies,
        cache: PrefixCache,
        identity: str,
        *,
        host: HostStore | None,
        disk: DiskStore | None,
    ) -> Self:
        """Those of an engine.

        Args:
            copies: of its pages.
            identity: what keys and values depend on besides tokens and labels.
            host, disk: None: there is no such tier.
        """
        stores = TierStores(copies, host=host, disk=disk)
        return cls(stores, ModuleTiers(stores, identity), PrefixTiers(stores, cache, identity))

    @property
    def stats(self) -> TierStats:
        """What was copied."""
        return self.stores.stats

    def note_launched(self, chunks: Iterable[Chunk]) -> None:
        """Keep the modules that are complete with a step that was launched, and go on with copies
        beside it."""
        self.modules.save_complete(chunk.module for chunk in chunks)
        self.prefixes.go_on()

    def forget(self) -> None:
        """Drop what is kept: the model has other weights."""
        self.prefixes.forget()
        self.stores.forget()

    def close(self, seconds: float) -> None:
        """Write what a restart would lose, for about that many seconds, and end the threads."""
        self.stores.until = time.monotonic() + seconds
        with suppress(RankError):  # what a rank had is gone with it
            while self.prefixes.save_idle() and time.monotonic() < self.stores.until:
                self.stores.flush()
        self.stores.close()
