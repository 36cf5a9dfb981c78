"""Onestem as a model of lm-eval (EleutherAI's harness): importing this registers it as `onestem`.

    python -m onestem.evals.lm_eval run --model onestem --model_args pretrained=MODEL --tasks ...

is lm-eval's own command line. All requests of a kind are one planned job: shared examples, and the
shared beginnings of options, are computed once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import (
    handle_stop_sequences,
    has_bos_prefix,
    maybe_truncate,
    normalize_gen_kwargs,
    postprocess_generated_text,
)
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from onestem.engine.text.tokenizer import read_hugging_face
from onestem.errors import ConfigError, RequestError
from onestem.llm import LLM
from onestem.request import SamplingParams

# lm-eval's `gen_kwargs` that mean the same here.
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed")
# ((context, continuation) as texts, ids of the context, ids of the continuation).
Pair = tuple[tuple[str, str] | None, list[int], list[int]]


@register_model("onestem")
class OnestemLM(TemplateLM):
    """An `LLM` that answers lm-eval's requests. Tokenisation is that of lm-eval's `hf` model.

    Args:
        pretrained: the model's directory or name.
        llm: an existing engine, instead of `pretrained`; it stays open.
        add_bos_token: whether texts begin with BOS; None: as the tokenizer does.
        max_gen_toks: maximum tokens of an answer, if its task gives none.
        think_end_token: the part of an answer before this token is removed.
        enable_thinking: a variable of the chat template.
        batch_size, max_batch_size: lm-eval's; without effect, since all requests are one job.
        options: of the engine (`EngineOptions`).
    """

    def __init__(
        self,
        pretrained: str | None = None,
        *,
        llm: LLM | None = None,
        add_bos_token: bool | None = None,
        max_gen_toks: int = 256,
        think_end_token: str | None = None,
        enable_thinking: bool | None = None,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        given = {name: value for name, value in options.items() if value is not None}
        if llm is None and pretrained is not None:
            llm = LLM(pretrained, **given)
        elif llm is None or pretrained is not None:
            raise ConfigError("lm-eval's model onestem needs one of pretrained and llm")
        elif given:
            raise ConfigError(f"llm exists already: {', '.join(given)} cannot be changed")
        self.llm = llm
        if self.llm.tokenizer is None:
            raise ConfigError(f"{self.llm.path} has no tokenizer, which lm-eval needs")
        self.tokenizer: Any = read_hugging_face(self.llm.path)
        self.max_gen_toks = max_gen_toks
        self._add_bos_token = add_bos_token
        self._think_end_token = think_end_token
        thinking = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
        self._chat_template_args = thinking

    @property
    def max_length(self) -> int:
        """Maximum tokens of a request."""
        return self.llm.engine.max_model_len

    @property
    def eot_token_id(self) -> int | None:
        """The token that ends a text."""
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int | None:
        """The token before a text that has no context."""
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else bos

    @property
    def device(self) -> str:
        """The model's device, for lm-eval's results."""
        return str(self.llm.device)

    @property
    def tokenizer_name(self) -> str:
        """Name of request caches, which hold texts with the chat template applied."""
        return self.llm.name.replace("/", "__")

    def get_model_info(self) -> dict[str, Any]:
        """Facts of the model for lm-eval's results."""
        return {
            "model_dtype": self.llm.options.dtype,
            "model_num_parameters": self.llm.decoder.num_parameters,
        }

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """Token ids of a text, with BOS as lm-eval's `hf` model adds it."""
        if add_special_tokens is None:
            prefix = self.tokenizer.decode(self.prefix_token_id)
            add_special_tokens = self._add_bos_token
            if has_bos_prefix(string, prefix):
                add_special_tokens = False
        special = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        return self.tokenizer.encode(string, **special)

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """A conversation as text; without a new turn, its last message goes on."""
        return self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
            **self._chat_template_args,
        )

    def _loglikelihood_tokens(
        self, requests: Sequence[Pair], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        prompts, completions, places = self._grouped(requests)
        scored = self.llm.score(prompts, completions)
        results = []
        for (texts, _context, _given), (prompt, place) in zip(requests, places, strict=True):
            score = scored[prompt][place]
            result = (score.logprob, score.is_greedy)
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, result)
            results.append(result)
        return results

    def _grouped(
        self, requests: Sequence[Pair]
    ) -> tuple[list[list[int]], list[list[list[int]]], list[tuple[int, int]]]:
        """(prompts, completions of each, (prompt, completion) index of each request)."""
        groups: dict[tuple[int, ...], int] = {}
        prompts: list[list[int]] = []
        completions: list[list[list[int]]] = []
        places = []
        for _texts, context, given in requests:
            if not given:
                raise RequestError("lm-eval asks for a continuation that has no tokens")
            # Cut from the left, as lm-eval's `hf` does; the last token is not computed.
            whole = [*context, *given][-(self.max_length + 1) :]
            if len(given) >= len(whole):
                raise RequestError(
                    f"a continuation has {len(given)} tokens, limit is {self.max_length} "
                    "after one of context: raise max_model_len"
                )
            prompt = whole[: -len(given)]
            group = groups.setdefault(tuple(prompt), len(groups))
            if group == len(prompts):
                prompts.append(prompt)
                completions.append([])
            places.append((group, len(completions[group])))
            completions[group].append(given)
        return prompts, completions, places

    def loglikelihood_rolling(
        self, requests: Iterable[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """Log-probability of each text as a whole, in windows where it is longer than the model."""
        windows: list[Pair] = []
        whose = []
        texts = [request.args[0] for request in requests]
        for i, text in enumerate(texts):
            for window in get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            ):
                windows.append((None, *make_disjoint_window(window)))
                whose.append(i)
        totals = [0.0] * len(texts)
        for i, (logprob, _) in zip(whose, self._loglikelihood_tokens(windows), strict=True):
            totals[i] += logprob
        for text, total in zip(texts, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), total)
        return totals

    def generate_until(self, requests: Iterable[Any], disable_tqdm: bool = False) -> list[str]:
        """The answer to each (context, `gen_kwargs`), cut at its stop texts."""
        asked = [request.args for request in requests]
        prompts, params, stops = [], [], []
        for context, gen_kwargs in asked:
            ids, one, until = self._generation(context, gen_kwargs)
            prompts.append(ids)
            params.append(one)
            stops.append(until)
        results = []
        for (context, gen_kwargs), until, answer in zip(
            asked, stops, self.llm.generate(prompts, params), strict=True
        ):
            output = answer.outputs[0]
            if output.finish_reason == "error":
                raise RequestError(f"lm-eval's request cannot be answered: {output.stop_reason}")
            text = self.tokenizer.decode(output.token_ids, skip_special_tokens=True)
            text = postprocess_generated_text(text, until, self._think_end_token)
            self.cache_hook.add_partial("generate_until", (context, gen_kwargs), text)
            results.append(text)
        return results

    def _generation(
        self, context: str, gen_kwargs: dict[str, Any]
    ) -> tuple[list[int], SamplingParams, list[str]]:
        """(ids of a prompt, sampling parameters, texts that end the answer)."""
        kwargs = dict(normalize_gen_kwargs(dict(gen_kwargs), self.max_gen_toks))
        eos = None if self.eot_token_id is None else self.tokenizer.decode([self.eot_token_id])
        until = [text for text in handle_stop_sequences(kwargs.pop("until", None), eos) if text]
        most = kwargs.pop("max_gen_toks")
        if not kwargs.pop("do_sample"):
            kwargs["temperature"] = 0.0
        unknown = [name for name in kwargs if name not in SAMPLING]
        if unknown:
            raise RequestError(
                f"gen_kwargs has {', '.join(unknown)}, expected until, max_gen_toks, do_sample, "
                f"{', '.join(SAMPLING)}"
            )
        ids, most = maybe_truncate(
            self.tok_encode(context), max_gen_toks=most, max_model_len=self.max_length
        )
        # Stop texts must not end an answer while the model thinks.
        stop = [] if self._think_end_token else until
        return ids, SamplingParams(max_tokens=most, stop=stop, **kwargs), until


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
