"""What `onestem models --check` says of a model as it would be loaded: the perplexity of a text,
beside that of the same weights in float32."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from onestem.engine.text.tokenizer import Tokenizer
from onestem.errors import ConfigError
from onestem.needs import Needs, needs_of
from onestem.options import EngineOptions

TOKENS = 4_000
CHARACTERS = 8  # of a token, at most on average: more text is not tokenised
LITTLE, MUCH = 0.01, 0.05  # more perplexity than in float32; lab/notes/models.md has what it costs


@dataclass(frozen=True)
class Perplexity:
    """Of a text's first tokens.

    Attributes:
        text: where it is from.
        loaded: of the model as it is loaded with these options.
        float32: with its weights as numbers of 32 bits, or the original ones; None: not known.
        verdict: what that says, or why it is not known.
    """

    text: str
    tokens: int
    loaded: float
    float32: float | None
    verdict: str

    def __str__(self) -> str:
        other = "" if self.float32 is None else f", in float32 {self.float32:.2f}"
        told = f"{self.tokens} tokens of {self.text}"
        return f"perplexity: {self.loaded:.2f}{other} ({told}): {self.verdict}"


def perplexity(
    options: EngineOptions, needs: Needs, original: Path | None, text: Path | None
) -> Perplexity | None:
    """Load a model, and its float32 form after it where it has one that fits in memory; None: it
    has no tokenizer.

    Args:
        original: a directory of the weights that were quantised.
        text: a file; None: Python's help topics.

    Raises:
        ConfigError: the text cannot be read, or is empty.
    """
    name, read = ("Python's help topics", _topics()) if text is None else (str(text), _read(text))
    if Tokenizer.from_directory(Path(needs.path)) is None:
        return None
    loaded, tokens = _of(options, read)
    exact, reason = _exact(options, needs, original)
    if exact is None:
        return Perplexity(name, tokens, loaded, None, reason)
    best, _ = _of(exact, read)
    more = loaded / best - 1
    told = "much is lost, take more bits" if more >= MUCH else "little is lost"
    verdict = f"{more:+.1%}, {'nothing is lost' if more < LITTLE else told}"
    return Perplexity(name, tokens, loaded, best, verdict)


def _exact(
    options: EngineOptions, needs: Needs, original: Path | None
) -> tuple[EngineOptions | None, str]:
    """Options of the float32 form; None, and why there is none to compare with."""
    exact = options.replace(dtype="float32", quantization=None)
    if original is not None:
        exact = exact.replace(model=str(original))
    elif options.quantization is None and needs.dtype == "float32" and _is_exact(needs):
        return None, "these are its weights in float32"
    elif options.quantization is None and not _is_exact(needs):
        return None, "--original DIR compares with the weights that were quantised"
    problem = needs_of(exact).problem
    return (exact, "") if problem is None else (None, f"in float32 it does not run here: {problem}")


def _is_exact(needs: Needs) -> bool:
    """Whether loading in float32 keeps a model's weights, and rounds no rows of products."""
    return needs.quantization is None or Path(needs.path).is_file()


def _of(options: EngineOptions, text: str) -> tuple[float, int]:
    """Perplexity of a text's first tokens, and how many these are."""
    from onestem.llm import LLM

    with LLM.from_options(options) as llm:
        assert llm.tokenizer is not None
        ids = llm.tokenizer.encode(text[: CHARACTERS * TOKENS], add_special_tokens=False)
        (score,) = llm.score([ids[:TOKENS]])
    return math.exp(-score.logprob / len(score.token_ids)), len(score.token_ids)


def _topics() -> str:
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def _read(path: Path) -> str:
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise ConfigError(f"--text {path} cannot be read: {reason}") from None
    if not text.strip():
        raise ConfigError(f"--text {path} is empty: give a text of some thousand tokens")
    return text
