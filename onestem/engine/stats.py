"""What an engine has done, in numbers."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields

__all__ = ["EngineStats"]


@dataclass
class EngineStats:
    """Counts since the engine was made (or `reset_stats`).

    `logical_prompt_tokens` counts each sequence's prompt, `processed_prompt_tokens` the prompt rows
    computed (also those computed again after a preemption); `shared_read_tokens` the keys, over all
    steps, that sequences saw and did not read, since one read of a run served several of them;
    `peak_kv_tokens` is the most KV memory in use by running requests, in tokens; times are seconds.
    """

    requests: int = 0
    steps: int = 0
    logical_prompt_tokens: int = 0
    processed_prompt_tokens: int = 0
    output_tokens: int = 0
    shared_read_tokens: int = 0
    num_preempted: int = 0
    peak_kv_tokens: int = 0
    host_seconds: float = 0.0
    model_seconds: float = 0.0
    sample_seconds: float = 0.0

    @property
    def saving(self) -> float:
        """BatchLLM, eq. 1."""
        if self.logical_prompt_tokens == 0:
            return 0.0
        return 1 - self.processed_prompt_tokens / self.logical_prompt_tokens

    def note_held(self, kv_tokens: int) -> None:
        """So much KV memory is in use, in tokens."""
        self.peak_kv_tokens = max(self.peak_kv_tokens, kv_tokens)

    def reset(self) -> None:
        for field in fields(self):
            setattr(self, field.name, field.default)

    def to_dict(self) -> dict[str, float]:
        return {**asdict(self), "saving": self.saving}
