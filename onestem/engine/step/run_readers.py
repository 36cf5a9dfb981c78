"""Which rows read which runs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from onestem.cache import PrefixCache, Run
from onestem.engine.sequence import Sequence
from onestem.engine.step.sequence_table import SequenceTable


@dataclass(eq=False, repr=False)
class RunReaders:
    """The rows that decode, by the runs of their paths. PML's are left out."""

    _cache: PrefixCache
    _table: SequenceTable
    _readers: dict[Run, dict[int, None]] = field(default_factory=dict)  # sids
    _reads: dict[int, list[Run]] = field(default_factory=dict)  # by sid

    def note(self, sequences: Iterable[Sequence]) -> None:
        """Add sequences that have a row."""
        version = self._cache.tree.num_splits
        for sequence in sequences:
            path = sequence.path(version) if sequence.modules is None else []
            self._reads[sequence.sid] = list(path)
            for run in path:
                self._readers.setdefault(run, {})[sequence.sid] = None

    def forget(self, sids: Iterable[int]) -> None:
        """Remove rows."""
        for sid in sids:
            for run in self._reads.pop(sid):
                readers = self._readers[run]
                del readers[sid]
                if not readers:
                    del self._readers[run]

    def clear(self) -> None:
        """Remove all."""
        self._readers.clear()
        self._reads.clear()

    def neighbour(self, above: list[Run]) -> tuple[int, int]:
        """The `sid` of a row that sees most of these runs, and how many tokens of them; -1: none
        does."""
        version = self._cache.tree.num_splits
        for run in reversed(above):
            # Readers of a run that was split are noted at its lower part.
            nodes = [run] if run in self._readers else [run, *run.children.values()]
            for node in nodes:
                for sid in self._readers.get(node, ()):
                    other = self._table.sequences[sid]
                    if other is not None and other.run is not None and run in other.path(version):
                        return sid, run.end
        return -1, 0
