"""State that all experiments of a run share: engine options, scale, peers, a loaded model."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeVar

from onestem.build import pick_device, pick_dtype
from onestem.errors import ConfigError
from onestem.llm import LLM
from onestem.models.config import ModelConfig
from onestem.models.find import find_model
from onestem.models.sizes import formats_of, weight_bytes
from onestem.options import EngineOptions, ShareMode
from onestem.shapes import find_shape
from onestem_lab.attention.measure import memory_bytes
from onestem_lab.attention.peers import PEERS
from onestem_lab.papers.shapes import scaled
from onestem_lab.peers.vllm_process import Vllm

__all__ = ["Bench"]

Value = TypeVar("Value")
MOST_TURNS = 1000  # of `repeat`
# Of `config.json`, for vLLM: 4 bits, in the groups that ours has.
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}


class Bench(AbstractContextManager["Bench"]):
    """One run of experiments.

    Args:
        options: of the engine. A model named there replaces the papers' shapes; `share` is used
            for the series `full`.
        scale: factor of lengths, numbers of requests, batches and models; 1 is the paper's size.
        part: factor of the numbers of requests and of a sweep's points only.
        repeat: times that an experiment runs: all its series in turns; medians count.
        against: peers, where an experiment knows them.

    Attributes:
        told_model: the model that the options name; None: each experiment has its own.
        refused: peers that were left out, and why.
        versions: of peers that ran in another interpreter.
    """

    def __init__(
        self,
        options: EngineOptions,
        *,
        scale: float = 1.0,
        part: float = 1.0,
        repeat: int = 1,
        against: Sequence[str] = (),
    ) -> None:
        for name, value in (("scale", scale), ("part", part)):
            if not 0 < value <= 1:
                raise ConfigError(f"{name} is {value}, expected above 0 and at most 1")
        if not 1 <= repeat <= MOST_TURNS:
            raise ConfigError(f"repeat is {repeat}, expected 1 to {MOST_TURNS}")
        for peer in against:
            if peer not in PEERS:
                raise ConfigError(f"peer is {peer!r}, expected one of: {', '.join(PEERS)}")
        told = "model" in options.model_fields_set
        self.told_model = str(options.model) if told else None
        self.options = options if options.seed is not None else options.replace(seed=0)
        self.scale = scale
        self.part = part
        self.repeat = repeat
        self.against = tuple(against)
        self.device = pick_device(options.device)
        self.refused: dict[str, str] = {}
        self.versions: dict[str, str] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="onestem-paper-")
        self._llm: tuple[EngineOptions, LLM] | None = None
        self._vllm: tuple[EngineOptions, Vllm] | None = None

    def __exit__(self, *error: object) -> None:
        self.release()
        self._folder.cleanup()

    # ----------------------------------------------------------------------------- sizes

    def size(self, count: int, least: int = 1) -> int:
        """Tokens, requests or a batch at this scale."""
        return max(least, round(count * self.scale))

    def thin(self, values: Sequence[Value]) -> list[Value]:
        """The ends of a sweep, and the number of points between them that scale and part allow."""
        count = min(len(values), max(2, round(len(values) * min(self.scale, self.part))))
        if count < 2:
            return list(values)
        return [values[round(i * (len(values) - 1) / (count - 1))] for i in range(count)]

    def thin_table(
        self, settings: Sequence[Value], at: Callable[[Value], Mapping[str, Any]]
    ) -> list[Value]:
        """The settings of a table in the rows and columns that `thin` leaves of each axis. `at`: a
        setting's place."""
        axes: dict[str, list[Any]] = {}
        for name, value in (pair for each in settings for pair in at(each).items()):
            axes.setdefault(name, []).append(value)
        left = {name: self.thin(_in_order(values)) for name, values in axes.items()}
        places = [at(each) for each in settings]
        kept = {
            i
            for i, there in enumerate(places)
            if all(value in left[name] for name, value in there.items())
        }
        # A table may have holes: each row and column that is left has a setting.
        for name, values in left.items():
            for value in values:
                with_it = [i for i, there in enumerate(places) if there.get(name) == value]
                if not kept.intersection(with_it):
                    kept.add(with_it[0])
        return [settings[i] for i in sorted(kept)]

    def share(self, mode: ShareMode) -> ShareMode:
        """Share mode of a series: for `full`, that of the options."""
        return self.options.share if mode == "full" else mode

    # ----------------------------------------------------------------------------- models

    def ranks(self, least: int = 1) -> int:
        """Devices that hold a model together, where an experiment asks for some."""
        return max(least, self.options.tensor_parallel_size)

    def engine_options(self, shape: str, positions: int, **more: Any) -> EngineOptions:
        """Options of an engine for the model of the options, or for a paper's shape at this scale
        with room for `positions`.

        Args:
            more: other options. A model of the options has a format of its own: `quantization` is
                of the shape alone.

        Raises:
            ConfigError: the device cannot hold it.
        """
        if self.told_model is not None:
            return self.options.replace(**{**more, "quantization": self.options.quantization})
        options = self.options.replace(**more, random_weights=True)
        return options.replace(model=self._shape(shape, positions, options))

    def llm(self, shape: str, positions: int, share: ShareMode = "full", **more: Any) -> LLM:
        """An engine for a shape (see `engine_options`), with an empty cache. The last one stays
        loaded, so ask for equal engines in succession."""
        return self._loaded(self.engine_options(shape, positions, share=self.share(share), **more))

    def named_llm(self, model: str) -> LLM:
        """An engine for the model of the options, or else for `model`, with its own weights."""
        return self._loaded(self.options.replace(model=self.told_model or model))

    def _loaded(self, options: EngineOptions) -> LLM:
        if self._llm is None or self._llm[0] != options:
            self.release()
            self._llm = options, LLM.from_options(options)
        llm = self._llm[1]
        llm.engine.cache.clear()
        llm.engine.reset_stats()
        return llm

    def vllm(self, shape: str, positions: int, **more: Any) -> tuple[Vllm, int]:
        """(vLLM with a shape of a paper, see `engine_options`; size of its vocabulary). The last
        one stays loaded, and nothing else."""
        options = self.engine_options(shape, positions, **more)
        folder = find_model(str(options.model))
        config = ModelConfig.from_directory(folder)
        if self._vllm is None or self._vllm[0] != options:
            self.release()
            dtype = pick_dtype(self.options.dtype, config, self.device)
            settings = {
                "dtype": str(dtype).removeprefix("torch."),
                "max_model_len": positions,
                "tensor_parallel_size": options.tensor_parallel_size,
            }
            if options.quantization == "int4":
                settings["hf_overrides"] = {"quantization_config": GPTQ}
            vllm = Vllm()
            self.versions["vllm"] = vllm.load(folder, settings)["version"]
            self._vllm = options, vllm
        return self._vllm[1], config.vocab_size

    def release(self) -> None:
        """Free the loaded model."""
        if self._llm is not None:
            self._llm[1].close()
            self._llm = None
        if self._vllm is not None:
            self._vllm[1].close()
            self._vllm = None

    def _shape(self, shape: str, positions: int, options: EngineOptions) -> str:
        folder = Path(self._folder.name) / f"{shape}-{positions}"
        if not folder.exists():
            folder.mkdir()
            published = (find_shape(shape) / "config.json").read_text()
            config = scaled(json.loads(published), self.scale)
            config["max_position_embeddings"] = max(
                positions, config.get("max_position_embeddings", 0)
            )
            (folder / "config.json").write_text(json.dumps(config))
        self._check_memory(shape, ModelConfig.from_directory(folder), options)
        return str(folder)

    def _check_memory(self, shape: str, config: ModelConfig, options: EngineOptions) -> None:
        dtype = pick_dtype(options.dtype, config, self.device)
        formats = formats_of(config, options.quantization, dtype, self.device)
        needed = weight_bytes(config, dtype, self.device, formats)
        on_gpus = options.tensor_parallel_size if self.device.type == "cuda" else 1
        there = on_gpus * memory_bytes(self.device)
        if needed > 0.9 * there:
            raise ConfigError(
                f"{shape} takes {needed / 2**30:.0f} GiB of weights, {self.device.type} has "
                f"{there / 2**30:.0f}: give --scale below 1, or another --model"
            )


def _in_order(values: Sequence[Any]) -> list[Any]:
    """Each value once: numbers in rising order, names in their order."""
    found = list(dict.fromkeys(values))
    return sorted(found) if all(isinstance(value, (int, float)) for value in found) else found
