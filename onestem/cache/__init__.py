"""Ownership of the pages of KV memory. Bookkeeping only: no torch."""

from onestem.cache.modules import ModuleRun, ModuleStore
from onestem.cache.pages import PagePool
from onestem.cache.prefix import PrefixCache
from onestem.cache.run import Run
from onestem.cache.states import StatePool, StateSlot
