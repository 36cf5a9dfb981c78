"""What vLLM calls things, and what they are here. A test holds our side to the declarations."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["ENGINE", "ROUTES", "SAMPLING", "Name"]


class Name(NamedTuple):
    """What a name of vLLM's is here.

    Attributes:
        ours: our name; None: it is refused.
        note: what differs, or the way out.
    """

    ours: str | None
    note: str = ""


def _same(*names: str) -> dict[str, Name]:
    return {name: Name(name) for name in names}


SAMPLING = {
    **_same("n", "max_tokens", "min_tokens"),
    "temperature": Name("temperature", "default: the model's own, then 1.0"),
    "top_p": Name("top_p", "default: the model's own"),
    "top_k": Name("top_k", "default: the model's own"),
    "min_p": Name("min_p", "default: the model's own"),
    **_same("presence_penalty", "frequency_penalty"),
    "repetition_penalty": Name("repetition_penalty", "default: the model's own"),
    "seed": Name("seed", "the same token in any batch and order"),
    **_same("stop", "stop_token_ids", "ignore_eos", "include_stop_str_in_output"),
    "logprobs": Name("logprobs", "-1 is refused"),
    "prompt_logprobs": Name(
        "prompt_logprobs", "reads the prefix cache; for given texts `LLM.score` is faster"
    ),
    **_same("skip_special_tokens", "logit_bias", "allowed_token_ids", "bad_words"),
    "structured_outputs": Name("structured_outputs", "becomes a `response_format`"),
    "output_kind": Name(
        None, "an argument of `LLM.stream` and `AsyncLLM.generate`: `cumulative` or `delta`"
    ),
    "logprob_token_ids": Name(None, "`LLM.score` with these tokens as completions"),
    "prompt_logprob_token_ids": Name(None, "`LLM.score`"),
    "prompt_logprob_start": Name(None, "`LLM.score`: the prompt is what is not scored"),
    "flat_logprobs": Name(None, "log-probabilities are made when they are read"),
    "detokenize": Name(None, "read `token_ids`"),
    "spaces_between_special_tokens": Name(None, "leave it out"),
    "skip_reading_prefix_cache": Name(None, "use a `cache_salt` of its own over HTTP"),
    "thinking_token_budget": Name(None, "use `max_tokens`"),
    "repetition_detection": Name(None, "use a penalty or `stop`"),
    "extra_args": Name(None, "there are no plug-ins of the sampler"),
    "stream_interval": Name(None, "`onestem serve --stream-interval`"),
}

ENGINE = {
    "model": Name("model", "also `embedded` and `shape:NAME`"),
    **_same("dtype", "max_model_len", "max_num_seqs", "seed", "logprobs_mode"),
    "quantization": Name(
        "quantization", "rounds 16-bit weights; formats of checkpoints are found by themselves"
    ),
    "kv_cache_memory_bytes": Name("kv_memory", "also text like 8GiB"),
    "gpu_memory_utilization": Name(None, "`kv_memory`; auto takes 90% of what is free"),
    "max_num_batched_tokens": Name("max_step_tokens"),
    "block_size": Name("page_size", "any number; prefixes match at single tokens"),
    "attention_backend": Name("impl", "auto is the fastest there is"),
    "load_format": Name("random_weights", "in place of `dummy`"),
    "enable_prefix_caching": Name("share", "full is the default; off for measuring"),
    "enable_chunked_prefill": Name(None, "it is always on; `max_step_tokens` sizes the chunks"),
    "scheduling_policy": Name(None, "jobs run in what interactive requests leave free"),
    "enforce_eager": Name(None, "leave it out"),
    "compilation_config": Name(None, "leave it out"),
    "tokenizer": Name(None, "the tokenizer is the one in the model's directory"),
    "trust_remote_code": Name(None, "no code of a model is run"),
    "enable_sleep_mode": Name(None, "`sleep` and `wake_up` are always there"),
    "enable_lora": Name(None, "merge the adapter into the weights"),
    "speculative_config": Name(None, "there is no speculative decoding"),
    "tensor_parallel_size": Name("tensor_parallel_size", "of one machine"),
    "pipeline_parallel_size": Name(None, "`onestem batch --replicas N`"),
    "data_parallel_size": Name(None, "`onestem batch --replicas N`"),
}

ROUTES = {
    "POST /v1/chat/completions": Name("POST /v1/chat/completions", "also `prefix` and `pml`"),
    "POST /v1/completions": Name("POST /v1/completions", "also `prefix` and `pml`"),
    "GET /v1/models": Name("GET /v1/models"),
    "POST /tokenize": Name("POST /tokenize"),
    "POST /detokenize": Name("POST /detokenize"),
    "GET /health": Name("GET /health", "503 while requests are not taken"),
    "GET /metrics": Name("GET /metrics", "names begin with `onestem_`"),
    "GET /version": Name("GET /version"),
    "POST /v1/score": Name(
        "POST /v1/score", "log-probabilities of texts; vLLM compares two texts with it"
    ),
    "POST /pause": Name("POST /pause"),
    "POST /resume": Name("POST /resume"),
    "POST /sleep": Name("POST /sleep"),
    "POST /wake_up": Name("POST /wake_up"),
    "POST /reset_prefix_cache": Name("POST /reset_prefix_cache"),
    "POST /v1/embeddings": Name(None, "there are no embeddings"),
    "POST /v1/responses": Name(None, "`POST /v1/chat/completions`"),
    "POST /v1/messages": Name(None, "`POST /v1/chat/completions`"),
    "POST /v1/audio/transcriptions": Name(None, "text alone is read"),
    "POST /v1/load_lora_adapter": Name(None, "merge the adapter into the weights"),
}
