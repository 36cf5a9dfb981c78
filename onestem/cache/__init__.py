"""Who owns which page of KV memory. Bookkeeping only: no torch."""

from onestem.cache.pages import PagePool
from onestem.cache.prefix import PrefixCache, Run

__all__ = ["PagePool", "PrefixCache", "Run"]
