"""What vLLM calls things, and what they are here.

Errors read these tables where somebody gives a name of vLLM's, and docs/from-vllm.md is made of
them. Tests hold our side to the declarations.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypeVar

from onestem.errors import UnsupportedError

P = ParamSpec("P")
Result = TypeVar("Result")


class Name(NamedTuple):
    """What a name of vLLM's is here.

    Attributes:
        ours: our name; None: it is refused.
        note: what differs, or the way out. Names of ours are in backticks.
    """

    ours: str | None
    note: str = ""


def _same(*names: str, note: str = "") -> dict[str, Name]:
    return {name: Name(name, note) for name in names}


def _refused(note: str, *names: str) -> dict[str, Name]:
    return {name: Name(None, note) for name in names}


LEAVE_OUT = "leave it out"
TEXT_ALONE = "leave it out: text alone is read"
MERGE = "merge the adapter into the weights (PEFT's `merge_and_unload`), and give their directory"
NO_DRAFTS = "leave it out: there is no speculative decoding"
FOUND = "leave it out: the form of calls is read off the model's chat template"
TEMPLATE = "give a file as the engine's option `chat_template`"
ONE_MACHINE = "`onestem batch --replicas N` deals a job to N engines; a server is one engine"
MODELS_OWN = "default: the model's own"
OWN_TOKENIZER = "leave it out: the tokenizer is the one in the model's directory"
IN_CONFIG = "change config.json in a copy of the model's directory"
NO_CODE = "leave it out: no code of a model is run"
OWN_DTYPE = "leave it out: keys and values have the model's dtype"
MASKS = "leave it out: xgrammar writes the masks"
REASONING = "leave it out: the form of reasoning is read off the model's chat template"
TLS = "let a proxy speak TLS (docs/operating.md)"
PROXY = "put a proxy before the server (docs/operating.md)"
WEIGHTS = "`update_weights` takes new weights (docs/rollouts.md)"
NO_EMBEDDINGS = "there are no embeddings and classes; `score` gives log-probabilities of texts"
JUDGED = "by causal models: `classifier_from_token` is a field, and nothing is overridden"
BELOW = "give `host_kv` a size such as 8GiB, or `disk_kv` a folder"
TRACE = "`trace=FILE` writes what each step computes"

SAMPLING = {
    **_same("n", "max_tokens", "min_tokens"),
    "temperature": Name("temperature", "default: the model's own, then 1.0"),
    **_same("top_p", "top_k", "min_p", note=MODELS_OWN),
    **_same("presence_penalty", "frequency_penalty"),
    **_same("repetition_penalty", note=MODELS_OWN),
    "seed": Name("seed", "the same token in any batch and order"),
    **_same("stop", "stop_token_ids", "ignore_eos", "include_stop_str_in_output"),
    "logprobs": Name("logprobs", "-1 is refused"),
    "prompt_logprobs": Name(
        "prompt_logprobs", "reads the prefix cache; for given texts `LLM.score` is faster"
    ),
    **_same("skip_special_tokens", "logit_bias", "allowed_token_ids", "bad_words"),
    "structured_outputs": Name("structured_outputs", "becomes a `response_format`"),
    "guided_decoding": Name("structured_outputs", "vLLM's older name"),
    "output_kind": Name(
        None, "give `LLM.stream` or `AsyncLLM.generate` an `output_kind`: `cumulative` or `delta`"
    ),
    "best_of": Name(None, "give `n` and `logprobs`, and take the highest `cumulative_logprob`"),
    "use_beam_search": Name(None, "give `n` and `logprobs`; there is no beam search"),
    **_refused("leave it out: there is no beam search", "length_penalty", "early_stopping"),
    "logits_processors": Name(None, "use `logit_bias`, `bad_words` or `response_format`"),
    "truncate_prompt_tokens": Name(None, "cut the prompt's ids before"),
    "logprob_token_ids": Name(None, "call `LLM.score` with these tokens as completions"),
    "prompt_logprob_token_ids": Name(None, "call `LLM.score`"),
    "prompt_logprob_start": Name(None, "call `LLM.score`: the prompt is what is not scored"),
    "flat_logprobs": Name(None, "leave it out: log-probabilities are made when they are read"),
    "detokenize": Name(None, "leave it out, and read `token_ids`"),
    "spaces_between_special_tokens": Name(None, LEAVE_OUT),
    "skip_reading_prefix_cache": Name(None, "use a `cache_salt` of its own over HTTP"),
    "thinking_token_budget": Name(None, "use `max_tokens`"),
    "repetition_detection": Name(None, "use a penalty or `stop`"),
    "extra_args": Name(None, "leave it out: there are no plug-ins of the sampler"),
    "stream_interval": Name(None, "give `onestem serve` a `--stream-interval`"),
}

ENGINE = {
    "model": Name("model", "also `embedded` and `shape:NAME`"),
    **_same("dtype", "max_model_len", "max_num_seqs", "seed", "logprobs_mode"),
    "quantization": Name(
        "quantization", "rounds 16-bit weights; formats of checkpoints are found by themselves"
    ),
    "kv_cache_memory_bytes": Name("kv_memory", "also text like 8GiB"),
    "gpu_memory_utilization": Name(
        None, "give `kv_memory` a size; its default takes 90% of what is free beside the weights"
    ),
    "num_gpu_blocks_override": Name(None, "give `kv_memory` a size"),
    **_refused(OWN_DTYPE, "kv_cache_dtype", "calculate_kv_scales"),
    "max_num_batched_tokens": Name("max_step_tokens"),
    "block_size": Name("page_size", "any number; prefixes match at single tokens"),
    "attention_backend": Name("impl", "auto is the fastest there is"),
    "load_format": Name(
        "random_weights", "in place of `dummy`; safetensors is the one format that is read"
    ),
    "enable_prefix_caching": Name("share", "full is the default; off for measuring"),
    "prefix_caching_hash_algo": Name(None, "leave it out: prefixes are compared by their tokens"),
    "enable_chunked_prefill": Name(
        None, "leave it out: it is always on, and `max_step_tokens` sizes the chunks"
    ),
    "scheduling_policy": Name(
        None, "leave it out: jobs run in what interactive requests leave free"
    ),
    "async_scheduling": Name(None, "leave it out: it is always on, on a GPU"),
    **_refused(LEAVE_OUT, "num_scheduler_steps", "enforce_eager", "compilation_config"),
    **_refused(LEAVE_OUT, "cuda_graph_sizes", "max_seq_len_to_capture", "disable_cascade_attn"),
    **_refused(LEAVE_OUT, "disable_custom_all_reduce", "disable_log_stats", "additional_config"),
    "max_logprobs": Name(None, "leave it out: the limit is fixed"),
    **_refused(OWN_TOKENIZER, "tokenizer", "tokenizer_mode", "tokenizer_revision"),
    "skip_tokenizer_init": Name(None, "leave it out, and give prompts as token ids"),
    "revision": Name(None, "download that revision, and give its directory"),
    **_refused(NO_CODE, "code_revision", "trust_remote_code", "model_impl"),
    **_refused(IN_CONFIG, "hf_overrides", "rope_scaling", "rope_theta"),
    "hf_config_path": Name(None, "put config.json into the model's directory"),
    "hf_token": Name(None, "leave it out: the variable HF_TOKEN is read"),
    "download_dir": Name(None, "leave it out: the variable HF_HOME names the folder"),
    "ignore_patterns": Name(None, "leave it out: only files that are needed are fetched"),
    "generation_config": Name(
        None, "leave it out: generation_config.json is read, and requests say what differs"
    ),
    "override_generation_config": Name(None, "give requests what differs"),
    "enable_sleep_mode": Name(None, "leave it out: `sleep` and `wake_up` are always there"),
    **_refused(MERGE, "enable_lora", "max_loras", "max_lora_rank", "lora_dtype", "max_cpu_loras"),
    **_refused(MERGE, "fully_sharded_loras", "lora_modules"),
    **_refused(NO_DRAFTS, "speculative_config", "speculative_model", "num_speculative_tokens"),
    "cpu_offload_gb": Name(None, "give `quantization`, or `tensor_parallel_size`"),
    **_refused(BELOW, "swap_space", "kv_transfer_config"),
    "kv_events_config": Name(None, "leave it out"),
    **_refused(TEXT_ALONE, "limit_mm_per_prompt", "mm_processor_kwargs", "mm_processor_cache_gb"),
    **_refused(TEXT_ALONE, "allowed_local_media_path", "enable_prompt_embeds"),
    **_refused(NO_EMBEDDINGS, "task", "runner", "convert", "pooler_config"),
    **_refused(NO_EMBEDDINGS, "override_pooler_config"),
    **_refused(MASKS, "structured_outputs_config", "guided_decoding_backend"),
    "chat_template": Name("chat_template", "a file"),
    "tensor_parallel_size": Name("tensor_parallel_size", "of one machine"),
    "pipeline_parallel_size": Name(None, "give `tensor_parallel_size`, of one machine"),
    "data_parallel_size": Name(None, ONE_MACHINE),
    "enable_expert_parallel": Name(None, "give `tensor_parallel_size`, which cuts experts too"),
    "distributed_executor_backend": Name(
        None, "leave it out: `tensor_parallel_size` starts processes"
    ),
}

SERVE = {
    **_same("host", "port", "served_model_name", "stream_interval"),
    "api_key": Name("api_key_file", "a file: a key is no argument, which others could read"),
    "chat_template_content_format": Name(None, "leave it out: the template says it"),
    "response_role": Name(None, LEAVE_OUT),
    **_refused(FOUND, "enable_auto_tool_choice", "tool_call_parser", "tool_parser_plugin"),
    **_refused(REASONING, "reasoning_parser", "enable_reasoning"),
    "uvicorn_log_level": Name("log_level"),
    **_refused("give `log_level`", "disable_log_requests", "enable_log_requests"),
    **_refused("give `log_level`", "disable_uvicorn_access_log", "max_log_len"),
    **_refused(TLS, "ssl_keyfile", "ssl_certfile", "ssl_ca_certs"),
    "root_path": Name(None, "let a proxy cut the path"),
    **_refused(PROXY, "middleware", "allowed_origins"),
    "enable_prompt_tokens_details": Name(None, "leave it out: `cached_tokens` are always told"),
    "enable_force_include_usage": Name(None, "ask for it with `stream_options`"),
    "enable_request_id_headers": Name(None, "leave it out: answers always have x-request-id"),
    "return_tokens_as_token_ids": Name(None, "ask for it with `return_token_ids`"),
    **_refused(LEAVE_OUT, "api_server_count", "headless", "disable_frontend_multiprocessing"),
}

FIELDS = {
    **_same("echo", "stream", "stream_options", "cache_salt", "return_token_ids", "tools"),
    **_same("tool_choice", "parallel_tool_calls", "chat_template_kwargs", "reasoning_effort"),
    **_same("add_generation_prompt", "continue_final_message", "user", "metadata"),
    **_same("guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    "guided_decoding_backend": Name(None, MASKS),
    "guided_whitespace_pattern": Name(None, "leave it out: `response_format` has `whitespace`"),
    "best_of": Name(None, "give `n` and `logprobs`, and take the most probable answer"),
    "use_beam_search": Name(None, "give `n` and `logprobs`; there is no beam search"),
    **_refused("there is no beam search", "length_penalty", "early_stopping"),
    "truncate_prompt_tokens": Name(None, "cut the prompt before"),
    "add_special_tokens": Name(None, "give token ids to say which there are"),
    "priority": Name(None, "keys have weights (docs/operating.md), and batches wait for requests"),
    "request_id": Name(None, "send an x-request-id header, or read the answer's `id`"),
    "chat_template": Name(None, TEMPLATE),
    "documents": Name("documents", "also texts; other templates have them too"),
    "mm_processor_kwargs": Name(None, TEXT_ALONE),
    "kv_transfer_params": Name(None, "leave it out: prompts and answers share one engine"),
    "vllm_xargs": Name(None, "leave it out: there are no plug-ins of the sampler"),
    "include_reasoning": Name(None, REASONING),
    "prompt_embeds": Name(None, "leave it out: text and token ids alone are read"),
    "return_tokens_as_token_ids": Name(None, "ask for it with `return_token_ids`"),
    "suffix": Name(None, "put what follows into the prompt, as the model's template has it"),
    "functions": Name(None, "give `tools`"),
    "function_call": Name(None, "give `tool_choice`"),
}

ARGUMENTS = {
    **_same("prompts", "sampling_params", "use_tqdm", "messages", "tools"),
    **_same("add_generation_prompt", "continue_final_message", "chat_template_kwargs"),
    **_refused(MERGE, "lora_request", "prompt_adapter_request"),
    "prompt_token_ids": Name(None, "give the ids as prompts"),
    "priority": Name(None, "leave it out: all prompts of a call are planned together"),
    "guided_options_request": Name(None, "use `structured_outputs` of `SamplingParams`"),
    "tokenization_kwargs": Name(None, "tokenise before, and give ids as prompts"),
    "chat_template": Name(None, TEMPLATE),
    "chat_template_content_format": Name(None, "leave it out: the template says it"),
    "mm_processor_kwargs": Name(None, TEXT_ALONE),
}

METHODS = {
    "generate": Name("generate", 'prompts are texts, ids, or `{"prompt_token_ids": ...}`'),
    **_same("chat", "sleep", "wake_up", "reset_prefix_cache"),
    **_same("abort", "pause_generation", "resume_generation"),
    "score": Name("score", "log-probabilities of completions; vLLM compares two texts with it"),
    "beam_search": Name(
        None,
        "sample several answers (`SamplingParams(n=8, logprobs=0)`) and take the one with the "
        "highest `cumulative_logprob`; or search by steps: going on from an output computes "
        "nothing again (docs/rollouts.md)",
    ),
    **_refused(NO_EMBEDDINGS, "embed", "classify", "encode", "reward"),
    **_refused(WEIGHTS, "collective_rpc", "apply_model"),
    "get_tokenizer": Name(None, "read `tokenizer`"),
    "set_tokenizer": Name(None, "the tokenizer is the one in the model's directory"),
    "get_default_sampling_params": Name(
        None, "leave sampling_params out: fields that are None have the model's own defaults"
    ),
    "get_metrics": Name(None, "each output has `metrics`"),
    **_refused(TRACE, "start_profile", "stop_profile"),
    "llm_engine": Name(None, "read `engine`"),
    "add_lora": Name(None, MERGE),
}

ROUTES = {
    **_same("POST /v1/chat/completions", "POST /v1/completions", note="also `prefix` and `pml`"),
    **_same("GET /v1/models", "POST /tokenize", "POST /detokenize"),
    **_same("GET /health", note="503 while requests are not taken"),
    **_same("GET /metrics", note="names begin with `onestem_`"),
    **_same("GET /version"),
    **_same("POST /v1/messages", "POST /v1/responses", note="answered as chats"),
    **_same("POST /v1/rerank", "POST /rerank", "POST /v2/rerank", note=JUDGED),
    **_same("POST /v1/score", "POST /score", note=f"{JUDGED}; also log-probabilities of texts"),
    **_same("POST /pause", "POST /resume", "POST /sleep", "POST /wake_up"),
    **_same("POST /reset_prefix_cache"),
    **_refused(NO_EMBEDDINGS, "POST /v1/embeddings", "POST /pooling", "POST /classify"),
    "POST /v1/audio/transcriptions": Name(None, "text alone is read"),
    "POST /v1/load_lora_adapter": Name(None, MERGE),
    "POST /v1/unload_lora_adapter": Name(None, MERGE),
}


def way_out(
    name: str, table: Mapping[str, Name], spelled: Callable[[str], str] = lambda ours: ours
) -> str:
    """The end of an error's line for a name that is not there; "": it is not one of vLLM's.

    Args:
        spelled: makes of a name of ours what the reader types.
    """
    told = table.get(name)
    if told is None or told.ours == name:
        return ""
    here = [] if told.ours is None else [f"here it is {spelled(told.ours)}"]
    note = re.sub(r"`([^`]+)`", lambda one: spelled(one[1]), told.note)
    return f" (vLLM's): {'; '.join([*here, note] if note else here)}"


def refuses_vllms(method: Callable[P, Result]) -> Callable[P, Result]:
    """Refuse arguments of a method that vLLM's has, with the way out."""

    @functools.wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> Result:
        for name in kwargs:
            if name in ARGUMENTS and ARGUMENTS[name].ours is None:
                hint = way_out(name, ARGUMENTS)
                raise UnsupportedError(f"{method.__name__} has no argument {name!r}{hint}")
        return method(*args, **kwargs)

    return call


class MissingMethodError(UnsupportedError, AttributeError):
    """A method of vLLM's that is not there; `hasattr` says so too."""


class Beside:
    """A class that says the way out where a method of vLLM's is asked for."""

    if not TYPE_CHECKING:  # type checkers know what is there

        def __getattr__(self, name: str) -> Any:
            if hasattr(type(self), name):  # a property, in which an attribute was missing
                return object.__getattribute__(self, name)  # says which
            hint = way_out(name, METHODS)
            error = MissingMethodError if hint else AttributeError
            raise error(f"{type(self).__name__} has no attribute {name!r}{hint}")
