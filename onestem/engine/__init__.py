"""From requests to tokens: sampling, grammars, tokenizers, scheduling and the engine loop."""
