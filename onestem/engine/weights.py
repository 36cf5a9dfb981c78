"""Where an engine's weights and KV memory are while a trainer wants the device, and which weights
they are. Levels and tags are vLLM's."""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from onestem.checked import show
from onestem.engine.step.runner import StepRunner
from onestem.errors import RequestError
from onestem.models.decoder import Decoder
from onestem.models.names import listed
from onestem.models.updates import checked_tensors

TAGS = ("weights", "kv_cache")


@dataclass(eq=False, repr=False)
class Weights:
    """One engine's weights, and its KV memory as far as it goes and comes with them.

    Attributes:
        version: of the weights; what the checkpoint has is version 0.
        level: at which it was put to sleep; 0: it is awake.
        asleep: tags that are not awake.
    """

    decoder: Decoder
    _runner: StepRunner
    # Takes what is in flight and drops all keys and values; called before anything changes.
    _release: Callable[[], None]
    _written: Callable[[int], None]  # called with the version of weights that were written
    version: int = 0
    level: int = 0
    asleep: set[str] = field(default_factory=set)
    _missing: set[str] = field(default_factory=set)  # tensors whose values were dropped

    @property
    def is_ready(self) -> bool:
        """Whether a step can be computed."""
        return not self.asleep and not self._missing

    def check_ready(self) -> None:
        """Raise `RequestError` unless a step can be computed."""
        if self.asleep:
            parts = " and ".join(tag for tag in TAGS if tag in self.asleep)
            raise RequestError(
                f"the LLM is asleep (level {self.level}: {parts}): call wake_up() before requests"
            )
        if self._missing:
            raise RequestError(
                "the weights were dropped, and have no values yet for "
                f"{listed(sorted(self._missing))}: give them with update_weights()"
            )

    def sleep(self, level: int) -> None:
        """Free the device's memory: KV memory, and the weights, which go to host memory (level 1)
        or are dropped (2: `update` has to give them again). Requests that run wait. A second call
        may only deepen the sleep."""
        if isinstance(level, bool) or level not in (1, 2):
            raise RequestError(f"sleep level is {show(level)}, expected 1 or 2")
        if level == 2 and self.decoder.quantised:
            raise RequestError(
                f"sleep level 2 drops weights, and {self.decoder.quantised} weights cannot be "
                "given again: use level 1"
            )
        if level <= self.level and self.asleep == set(TAGS):
            return
        self._release()
        if "kv_cache" not in self.asleep:
            self._runner.release_pages()
        self._runner.release_weights(keep=level == 1)
        self.level, self.asleep = max(level, self.level), set(TAGS)
        if level == 2:
            self.drop()
        gc.collect()
        if self.decoder.device.type == "cuda":
            torch.cuda.empty_cache()

    def wake_up(self, tags: Collection[str] | None = None) -> None:
        """Take the memory again for some of `TAGS`, or all."""
        if isinstance(tags, str) or not set(tags or ()) <= set(TAGS):
            raise RequestError(f"wake_up tags are {show(tags)}, expected some of {list(TAGS)}")
        wanted = self.asleep & set(TAGS if tags is None else tags)
        if "weights" in wanted:
            self._runner.restore_weights()
            self.asleep.discard("weights")
        if "kv_cache" in wanted:
            self._runner.restore_pages()
            self.asleep.discard("kv_cache")
        if wanted and not self.asleep:
            self.level = 0
            self._runner.warm_up()

    def drop(self) -> None:
        """Count weights as dropped: each tensor has to be given before the next request."""
        self._missing = set(self.decoder.places)

    def update(
        self, named_tensors: Iterable[tuple[str, Tensor]], version: int | None = None
    ) -> int:
        """Write other weights over the model's, in the same memory: some tensors or all, by their
        names in the checkpoint. Keys and values of the old ones are dropped; running requests go
        on with the new ones after the tokens that they have.

        Args:
            named_tensors: of any floating dtype and device; all are checked before one is written.
            version: what these weights are called; None: one more than the last.

        Returns:
            the version.

        Raises:
            WeightsError: names what is unknown, given twice, or of another shape.
            RequestError: the weights are asleep.
        """
        if "weights" in self.asleep:
            raise RequestError(
                'the weights are asleep: call wake_up(tags=["weights"]) before update_weights()'
            )
        if version is not None and (isinstance(version, bool) or not isinstance(version, int)):
            raise RequestError(f"version is {show(version)}, expected an integer")
        tensors = checked_tensors(self.decoder.config, named_tensors, self.decoder.quantised)
        self._release()
        try:
            self._runner.write_weights(tensors)
        except BaseException:
            self.drop()  # they are of no use
            raise
        self._missing -= tensors.keys()
        self.version = self.version + 1 if version is None else version
        self._written(self.version)
        return self.version
