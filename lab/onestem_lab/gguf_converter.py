"""Tiny models as llama.cpp's own converter writes them, read here, beside `transformers`.

    PYTHONPATH=LLAMA_CPP/gguf-py python -m onestem_lab.gguf_converter LLAMA_CPP [FAMILY ...]

`LLAMA_CPP` is a checkout, of which the converter alone is run. In the root of a clone: the models
are those of the tests. For each, float32 logits of 64 positions are compared over the whole
vocabulary. Exit code 1 where they differ by more than 1e-4.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from onestem.models.weights import load_decoder
from tests.models.as_gguf import CHANGES
from tests.models.dense import log_probabilities, oracle, prompt
from tests.models.tiny import make_tiny


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("families", nargs="*", default=tuple(CHANGES))
    options = parser.parse_args()
    sys.path.insert(0, str(options.checkout))
    logging.disable(logging.INFO)
    wrong = []
    for family in options.families:
        with tempfile.TemporaryDirectory() as folder:
            source = make_tiny(family, Path(folder) / "model", changes=CHANGES[family])
            try:
                file = convert(source, Path(folder) / "model.gguf")
                error = largest_error(source, file)
                told = f"{error:.2g}"
            except Exception as failed:
                error, told = 1.0, f"{type(failed).__name__}: {failed}"
        print(f"{family}: {told}", flush=True)
        wrong += [family] if error > 1e-4 else []
    sys.exit(1 if wrong else 0)


def convert(source: Path, target: Path) -> Path:
    """llama.cpp's file of a directory, without a vocabulary."""
    import gguf
    from conversion import get_model_class  # type: ignore[import-not-found]

    config = json.loads((source / "config.json").read_text())
    if "n_positions" in config:  # of GPT-2, whose published files have both
        (source / "config.json").write_text(json.dumps({**config, "n_ctx": config["n_positions"]}))
    # Gemma 3's converter counts the tokens itself.
    words = {str(token): token for token in range(config["vocab_size"])}
    vocabulary = {"model": {"vocab": words}, "added_tokens": []}
    (source / "tokenizer.json").write_text(json.dumps(vocabulary))
    (architecture,) = config["architectures"]
    kind: Any = get_model_class(architecture)
    kind.set_vocab = lambda self: self.gguf_writer.add_tokenizer_model("no_vocab")
    kind.no_mtp = True  # the tests' models predict no token after the next one
    with torch.inference_mode():
        kind(source, gguf.LlamaFileType.ALL_F32, target).write()
    return target


def largest_error(source: Path, file: Path) -> float:
    """The largest difference of a log-probability."""
    decoder = load_decoder(file, dtype=torch.float32, device="cpu")
    ids = prompt(64, decoder.config.vocab_size)
    return float((oracle(source, ids) - log_probabilities(decoder, ids)).abs().max())


if __name__ == "__main__":
    main()
