"""What `transformers` answers alone, after a cached prefix and in a batch is counted."""

from __future__ import annotations

from onestem_lab.bits_peers import transformers_kinds
from tests.engine.tiny_tokenizers import make_byte_level_tokenizer
from tests.models.tiny import VOCAB_SIZE, make_tiny


def test_transformers_is_asked_alone_again_and_in_a_batch(tmp_path):
    path = make_tiny("llama", tmp_path / "llama")
    make_byte_level_tokenizer(path, vocab_size=VOCAB_SIZE)
    kinds = transformers_kinds(path, "float32", prompts=4, tokens=40, sampled=3)
    again, prefix, whole, together = kinds
    assert (again.pairs, again.positions, again.problem) == (4, 12, "")
    assert (prefix.pairs, prefix.cached) == (4, 4 * 30)
    assert (whole.pairs, whole.cached) == (4, 4 * 39)
    assert together.pairs == 2
    assert max(kind.largest for kind in kinds) < 1e-3
