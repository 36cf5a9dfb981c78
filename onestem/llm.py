"""`LLM`: the offline interface for Python, with vLLM's names."""

from __future__ import annotations

import dataclasses
import gc
import inspect
import os
import weakref
from array import array
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from numbers import Integral
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypedDict, cast, overload

import numpy as np
import torch
from numpy.typing import NDArray

from onestem.batch import model_identity, output_lengths
from onestem.beside_vllm import Beside, refuses_vllms
from onestem.cache.storage import DiskStore, HostStore
from onestem.checked import show
from onestem.engine.engine import Engine
from onestem.engine.grammar.schema import check_schema
from onestem.engine.text.bounded import BoundedTokenizer
from onestem.engine.text.tokenizer import Tokenizer
from onestem.engine.trace import StepTrace
from onestem.engine.warm_up import warm_up
from onestem.errors import ConfigError, OnestemError, RequestError
from onestem.garbage import collecting_less
from onestem.models.config import GenerationDefaults, ModelConfig
from onestem.models.find import find_model
from onestem.models.part import part_of
from onestem.models.ranks import Ranks
from onestem.models.weights import load_decoder
from onestem.openai.read import calls_fields, read_chat
from onestem.openai.tools import Tools
from onestem.openai.write import message_of
from onestem.options import EngineOptions, parse_memory, takes
from onestem.parallel import Team
from onestem.planner import JobPlan, Prompts, RunningOrder, default_order, planner_of
from onestem.pml import CompiledPrompt, Layout, Library, Schema, encoding_prompts
from onestem.pml import Prompt as PmlPrompt
from onestem.progress import progress_bar
from onestem.rawtext import RawText
from onestem.request import (
    ONE_TOKEN,
    Answer,
    Logprob,
    Logprobs,
    RankedLogprobs,
    Request,
    RequestOutput,
    SamplingParams,
    Told,
)
from onestem.scores import (
    PathScores,
    Score,
    ScoreTree,
    completion_tree,
    pair_ids,
    rolling_windows,
    whole_ids,
)
from onestem.threads import ram_bytes, usable_cores

__all__ = [
    "GPU_SHARE",
    "AnyPrompt",
    "LLM",
    "OutputKind",
    "Prompt",
    "TextPrompt",
    "TokensPrompt",
    "check_output_kind",
    "check_ranks",
    "described",
    "grouped",
    "kv_memory_bytes",
    "largest_decode",
    "named_one",
    "pages_of",
    "params_for_each",
    "path_scores",
    "pick_device",
    "pick_dtype",
    "planned",
    "read_prompt",
    "set_threads",
    "several_prompts",
]


class TextPrompt(TypedDict):
    """vLLM's object for a text."""

    prompt: str


class TokensPrompt(TypedDict):
    """vLLM's object for token ids."""

    prompt_token_ids: Sequence[int]


Prompt = str | Sequence[int]
AnyPrompt = Prompt | TextPrompt | TokensPrompt
OutputKind = Literal["cumulative", "delta"]
PmlSource = PmlPrompt | str | os.PathLike[str]
GIB = 2**30
GPU_SHARE = 0.9  # of a GPU's free memory, for KV

# For a sequence of 1,024 sampled tokens (`onestem.ops.triton.penalties`).
PENALTY_LIST_BYTES = 32 * 1024


class LLM(Beside):
    """A model and the engine that runs it.

    Its arguments are the fields of `EngineOptions`. Defaults come from `ONESTEM_*` variables or a
    configuration file (docs/options.md).

    Attributes:
        options: as settled on this machine: no `auto` is left.
        asked: the options as they were given.

    Raises:
        OnestemError: with one line that says what is wrong and the way out.
    """

    @takes(EngineOptions)
    def __init__(self, options: EngineOptions) -> None:
        self._load(options)

    @classmethod
    def from_options(cls, options: EngineOptions) -> LLM:
        """An `LLM` of these options alone, whatever the environment says."""
        llm = cls.__new__(cls)
        llm._load(options)
        return llm

    def _load(self, options: EngineOptions) -> None:
        trace = None if options.trace is None else StepTrace(options.trace)
        self.team: Team | None = None
        self._running: weakref.ref[Generator[RequestOutput]] | None = None
        self.asked = options
        try:
            self._load_model(options)
        except BaseException:
            if trace is not None:
                trace.close()
            if self.team is not None:
                self.team.close()
            raise
        if trace is not None:
            self.engine.trace = trace
            trace.restart()

    def _load_model(self, options: EngineOptions) -> None:
        size = options.tensor_parallel_size
        set_threads(options.threads, size)
        self.name = str(options.model)
        self.path = find_model(self.name)
        self.random_weights = options.makes_weights_up
        self.quantization = options.quantization
        self.config = ModelConfig.from_directory(self.path)
        self.device = pick_device(options.device)
        self.dtype = pick_dtype(options.dtype, self.config, self.device)
        check_ranks(options, self.config)
        if size > 1:
            self.team = Team(size, self.device)
        load = load_decoder if self.team is None else self.team.load_decoder
        self.decoder = load(
            self.path,
            dtype=self.dtype,
            device=self.device,
            random_weights=self.random_weights,
            quantization=self.quantization,
        )
        self.tokenizer = Tokenizer.from_directory(self.path)
        max_step_tokens = options.max_step_tokens or self.decoder.step_rows
        beside = activation_bytes(self.config, self.dtype, max_step_tokens, self.device)
        beside += self.decoder.scratch_bytes
        memory = kv_memory_bytes(
            options.kv_memory,
            self.device,
            beside,
            ranks=size,
            most=None if self.team is None else self.team.free_bytes,
        )
        page_bytes = self.decoder.kv_bytes_per_token * options.page_size
        num_pages = pages_of(memory, options.page_size, page_bytes)
        settled = options.replace(
            device=str(self.device),
            dtype=str(self.dtype).removeprefix("torch."),
            kv_memory=num_pages * page_bytes,
            order=options.order or default_order(options.levels),
            random_weights=self.random_weights,
            threads=torch.get_num_threads(),
        )
        self._engine: Engine | None = Engine(
            self.decoder,
            self.tokenizer,
            GenerationDefaults.from_directory(self.path),
            settled,
            num_pages=num_pages,
            runners=None if self.team is None else self.team.make_runner,
        )
        warm_up(self._engine)
        self._count = 0
        self._schemas: Library | None = None
        host = parse_memory(options.module_host_memory)
        disk = None
        if options.module_disk is not None:
            most = parse_memory(options.module_disk_memory)
            disk = DiskStore(Path(options.module_disk), most, self._identity_for_modules())
        self.engine.keep_modules(host=HostStore(host) if host > 0 else None, disk=disk)
        self.options = self.engine.options

    # ----------------------------------------------------------------------------- life

    @property
    def engine(self) -> Engine:
        """The engine that runs the model.

        Raises:
            ConfigError: after `close`.
            RankError: a process that holds a part of the model has ended.
        """
        if self._engine is None:
            raise ConfigError(f"the LLM of {self.name} is closed: make another")
        if self.team is not None:
            self.team.check()
        return self._engine

    def close(self) -> None:
        """End what runs, and free the model and KV memory. Closing twice is fine."""
        if self._engine is None:
            return
        running = None if self._running is None else self._running()
        if running is not None and inspect.getgeneratorstate(running) != inspect.GEN_RUNNING:
            running.close()
        del running
        self._engine.close()
        self._engine = None
        del self.decoder
        gc.collect()
        if self.team is not None:  # graphs, which hold its collectives, are gone
            self.team.close()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # ----------------------------------------------------------------------------- offline

    @refuses_vllms
    @collecting_less()
    def generate(
        self,
        prompts: AnyPrompt | Sequence[AnyPrompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        parse_special: bool = True,
        use_tqdm: bool = True,
    ) -> list[Answer]:
        """Answer prompts (text or token ids), planned together; outputs in the prompts' order.

        Args:
            prompts: one or several; also as vLLM's `{"prompt": text}` and `{"prompt_token_ids":
                ids}`. The names of control tokens in a text are these tokens. BOS stands once: a
                text may begin with it.
            sampling_params: one for all or one each.
            parse_special: False: the names of control tokens are characters.
            use_tqdm: show a bar at a terminal (vLLM's name for it).

        Raises:
            RequestError: a prompt cannot be answered; of several, it says which (counted from 0).
                Nothing is computed then.
        """
        many = [_plain(prompt) for prompt in several_prompts(prompts)]
        ids = self._ids(many, parse_special)
        return self._answer(ids, _texts(many), sampling_params, use_tqdm=use_tqdm)

    @refuses_vllms
    def stream(
        self,
        prompts: AnyPrompt | Sequence[AnyPrompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        parse_special: bool = True,
        output_kind: OutputKind = "cumulative",
    ) -> Iterator[Answer]:
        """`generate`, with outputs as they grow: one of each prompt (`Answer.index` says which)
        after each step that sampled for it. Closing the iterator ends what is unfinished.

        Args:
            output_kind: outputs have all that there is so far (`cumulative`), or what is new
                (`delta`).

        Raises:
            RequestError: as `generate`, at once; or, when it is read, the LLM is asleep. After
                `wake_up` the iterator goes on.
        """
        check_output_kind(output_kind)
        many = [_plain(prompt) for prompt in several_prompts(prompts)]
        ids = self._ids(many, parse_special)
        requests, order = self._planned(ids, _texts(many), sampling_params)
        streams = [dataclasses.replace(request, stream=True) for request in requests]
        answers = self._run(planned(streams, order), output_kind) if requests else iter(())
        return _Awake(self.engine, self._with_index(answers, requests, order))

    @refuses_vllms
    @collecting_less()
    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        use_tqdm: bool = True,
    ) -> list[Answer]:
        """Answer one conversation or several, through the model's chat template. Messages are those
        of /v1/chat/completions (docs/server.md), and read alike.

        Args:
            add_generation_prompt: end each conversation with what begins an answer.
            continue_final_message: go on inside the last message; then without
                `add_generation_prompt`.
            tools: functions that the model may call. Answers are texts, calls among them;
                `assistant_message` reads these.
            tool_choice: `auto` (as None: calls fit their schemas), `required`, a function as
                OpenAI names it, or `none`: the template has the tools, and answers are free.
            chat_template_kwargs: further variables of the template, such as `enable_thinking`.
            use_tqdm: show a bar at a terminal.

        Raises:
            RequestError: as `generate`.
        """
        if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)):
            raise RequestError(f"messages is {show(messages)}, expected a list of messages")
        if len(messages) == 0:
            return []
        many = [messages] if isinstance(messages[0], Mapping) else messages
        tokenizer = self._bounded_tokenizer("chat")
        options = {
            "tools": tools,
            "tool_choice": tool_choice,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "chat_template_kwargs": chat_template_kwargs,
        }
        ids, callable_tools = [], None
        for i, conversation in enumerate(many):
            with named_one("conversation", i, len(many)):
                if not isinstance(conversation, Sequence):
                    raise RequestError(
                        f"messages is {show(conversation)}, expected a list of messages"
                    )
                prompt, callable_tools = read_chat({**options, "messages": conversation})
                assert prompt.messages is not None
                listed = tokenizer.apply_chat_template(prompt.messages, **vars(prompt.template))
                ids.append(_ids_of(listed))
        each = params_for_each(sampling_params, len(ids))
        if callable_tools is not None and callable_tools.mode != "none":
            each = self._held(each, callable_tools)
        return self._answer(ids, [None] * len(ids), each, use_tqdm=use_tqdm)

    def _held(self, each: list[SamplingParams], tools: Tools) -> list[SamplingParams]:
        """The parameters with calls held to their schemas; a shared object stays shared."""
        tokenizer = self._need_tokenizer("chat")
        form, token_of = tokenizer.tool_form, tokenizer.control_token
        held = {
            key: one.replace(**calls_fields(tools, one, form, token_of, check_schema))
            for key, one in {id(one): one for one in each}.items()
        }
        return [held[id(one)] for one in each]

    def assistant_message(self, answer: RequestOutput, index: int = 0) -> dict[str, Any]:
        """An answer of a chat with tools as OpenAI's message: `content`, and `tool_calls` if there
        are any. The conversation may go on with it.

        Args:
            index: which of the answer's `outputs`.
        """
        form = self._need_tokenizer("chat").tool_form
        told = message_of(answer.request_id, answer.outputs[index], form)
        message: dict[str, Any] = told["message"]
        return message

    # ----------------------------------------------------------------------------- scores

    @overload
    def score(self, prompts: Sequence[Prompt], *, parse_special: bool = ...) -> list[Score]: ...
    @overload
    def score(
        self,
        prompts: Sequence[Prompt],
        completions: Sequence[Sequence[Prompt]],
        *,
        parse_special: bool = ...,
    ) -> list[list[Score]]: ...

    @collecting_less()
    def score(
        self,
        prompts: Sequence[Prompt],
        completions: Sequence[Sequence[Prompt]] | None = None,
        *,
        parse_special: bool = True,
    ) -> list[Score] | list[list[Score]]:
        """Log-probabilities of completions of prompts (text or token ids), planned together. A
        shared beginning is computed once, a cached one not at all (docs/scores.md).

        Args:
            completions: some of each prompt. A prompt and its completions are all text, or all ids.
                None: the prompts are texts that are scored whole, after the BOS token (or EOS,
                for a model without one). A text longer than the model is cut into windows: each
                token is scored once, after as much of the text as lm-eval gives it.
            parse_special: as for `generate`, of prompts and completions.

        Returns:
            for each prompt a list with a score for each completion, or a score for each text.

        Raises:
            RequestError: something cannot be scored; it says which. Nothing is computed then.
        """
        _check_list("prompts", prompts)
        check_parse_special(parse_special)
        if completions is None:
            return self._score_texts(prompts, parse_special)
        _check_list("completions", completions)
        if len(completions) != len(prompts):
            raise RequestError(
                f"{len(completions)} lists of completions for {len(prompts)} prompts: give one each"
            )
        items, starts, whose = [], [], []
        for i, (prompt, some) in enumerate(zip(prompts, completions, strict=True)):
            with named_one("prompt", i, len(prompts)):
                context, given = self._pair_ids(prompt, some, parse_special)
                items += [np.concatenate((context, one)) for one in given]
                starts += [len(context)] * len(given)
                whose += [i] * len(given)
        scores: list[list[Score]] = [[] for _ in prompts]
        for i, score in zip(whose, self._score_items(items, starts, whose), strict=True):
            scores[i].append(score)
        return scores

    def _pair_ids(
        self, prompt: Prompt, completions: Sequence[Prompt], parse_special: bool
    ) -> tuple[NDArray[np.int64], list[NDArray[np.int64]]]:
        _check_list("completions", completions)
        context, *some = (_raw_or_ids(one, parse_special) for one in (prompt, *completions))
        ids, given = pair_ids(context, some, self.tokenizer)
        return np.asarray(ids, np.int64), [np.asarray(one, np.int64) for one in given]

    def _score_texts(self, texts: Sequence[Prompt], parse_special: bool) -> list[Score]:
        items, starts, whose = [], [], []
        for i, text in enumerate(texts):
            with named_one("text", i, len(texts)):
                ids = whole_ids(_raw_or_ids(text, parse_special), self.tokenizer)
            for first, start, end in rolling_windows(len(ids), self.engine.max_model_len):
                items.append(ids[first:end])
                starts.append(start - first)
                whose.append(i)
        parts: list[list[Score]] = [[] for _ in texts]
        for i, score in zip(whose, self._score_items(items, starts, whose), strict=True):
            parts[i].append(score)
        return list(map(Score.joined, parts))

    def _score_items(
        self, items: list[NDArray[np.int64]], starts: list[int], whose: list[int]
    ) -> list[Score]:
        """`whose`: the prompt of each item, for errors."""
        if not items:
            return []
        vocab_size = self.config.vocab_size
        for ids, i in zip(items, whose, strict=True):
            bad = ids[(ids < 0) | (ids >= vocab_size)]
            if len(bad):
                raise RequestError(
                    f"prompt {i}: token id {int(bad[0])}, expected ids from 0 to {vocab_size - 1}"
                )
        tree = ScoreTree(items, starts)
        plan = planner_of(self.options, self.kv_tokens)(tree.leaves)
        paths = tree.paths(RunningOrder(plan))
        requests = [
            dataclasses.replace(self._request(cast(Any, leaf), None, ONE_TOKEN), paths=(path,))
            for leaf, path in zip(tree.leaves, paths, strict=True)
        ]
        for i, leaf in zip(whose, tree.leaf_of, strict=True):
            if len(tree.leaves[leaf]) > self.engine.max_model_len:
                with named_one("prompt", i, whose[-1] + 1):
                    self.engine.validate(requests[leaf])
        outputs = {
            output.request_id: output
            for output in self.engine.run(planned(requests, RunningOrder(plan)))
        }
        return tree.scores([path_scores(outputs[one.request_id])[0] for one in requests])

    def score_pml(
        self,
        prompts: PmlSource | Sequence[PmlSource],
        completions: Sequence[Sequence[str]],
        *,
        isolation: str = "anchored",
    ) -> list[list[Score]]:
        """`score` for prompts in PML (see `generate_pml`). A completion is encoded by itself.

        Raises:
            PmlError: with file, line and column; nothing is computed then.
            RequestError: as `score`.
        """
        many = [prompts] if isinstance(prompts, (str, os.PathLike, PmlPrompt)) else list(prompts)
        _check_list("completions", completions)
        if len(completions) != len(many):
            raise RequestError(
                f"{len(completions)} lists of completions for {len(many)} prompts: give one each"
            )
        encode = self._need_tokenizer("PML").encode
        trees, requests = [], []
        for i, (prompt, texts) in enumerate(zip(many, completions, strict=True)):
            with named_one("prompt", i, len(many)):
                ids = [encode(text, add_special_tokens=False) for text in texts]
                if not ids or not all(ids):
                    raise RequestError(f"completions is {show(texts)}, expected texts with tokens")
                tree, paths = completion_tree(ids)
                made = self.pml_request(self.schemas.compile(prompt, isolation), ONE_TOKEN)
                trees.append(tree)
                requests.append(dataclasses.replace(made, paths=tuple(paths)))
        self._validate(requests)
        outputs = {o.request_id: o for o in self.engine.run(sorted(requests, key=_imported))}
        return [
            tree.scores(path_scores(outputs[request.request_id]))
            for tree, request in zip(trees, requests, strict=True)
        ]

    # ----------------------------------------------------------------------------- weights

    @property
    def weights_version(self) -> int:
        """Version of the weights; those of the checkpoint are version 0."""
        return self.engine.residence.version

    def update_weights(
        self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int | None = None
    ) -> int:
        """Write other weights over the model's, in the same memory: some tensors or all, by their
        names in the checkpoint (`model.named_parameters()` of transformers gives these). KV memory
        drops what the old ones computed. An answer that runs (`stream`) goes on with the new ones
        after the tokens that it has, and gives the version of each token (`weight_versions`).

        Args:
            named_tensors: of any floating dtype and device; all are checked before one is written.
            version: what these weights are called; None: one more than the last.

        Returns:
            the version.

        Raises:
            WeightsError: names what is unknown, given twice, or of another shape; nothing is
                changed then.
            RequestError: the weights are asleep.
        """
        return self.engine.update_weights(named_tensors, version)

    def sleep(self, level: int = 1) -> None:
        """Free the device's memory for other uses: KV memory and the weights. Weights wait in host
        memory (level 1; on a CPU they stay where they are) or are dropped (level 2;
        `update_weights` must give each of them before the next request). Requests are refused until
        `wake_up`; an answer that runs goes on then."""
        self.engine.sleep(level)

    def wake_up(self, tags: Collection[str] | None = None) -> None:
        """Take the memory again.

        Args:
            tags: `weights`, `kv_cache` or both; None: both.
        """
        self.engine.wake_up(tags)

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Drop the keys and values that are cached.

        Args:
            reset_running_requests: also those that running requests read; they are recomputed.

        Returns:
            whether nothing is left but pinned prefixes.
        """
        return self.engine.reset_prefix_cache(reset_running_requests=reset_running_requests)

    # ----------------------------------------------------------------------------- modules

    def _identity_for_modules(self) -> str:
        """What keys and values depend on besides a module's key."""
        made_up = " random" if self.random_weights else ""
        rounded = f" {self.quantization}" if self.quantization else ""
        return f"{model_identity(self.path)} {self.dtype}{made_up}{rounded}"

    @property
    def schemas(self) -> Library:
        """PML schemas that prompts may name."""
        if self._schemas is None:
            tokenizer = self._need_tokenizer("PML")
            positions = self.config.max_position_embeddings
            self._schemas = Library(tokenizer, max_positions=positions)
        return self._schemas

    def add_schema(self, schema: Schema | str | os.PathLike[str]) -> Layout:
        """Make a PML schema known to `generate_pml`: nodes, markup, or the file that it is in.

        Raises:
            PmlError: with file, line and column.
        """
        return self.schemas.add(schema)

    def generate_pml(
        self,
        prompts: PmlSource | Sequence[PmlSource],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        isolation: str = "anchored",
    ) -> list[Answer]:
        """Answer prompts in PML: markup, files (`Path`) or nodes; outputs in the prompts' order.

        A module is computed with the first prompt that imports it, and read by all of them.

        Args:
            isolation: what cached tokens attend to: `anchored`, `isolated` or `off` (docs/pml.md).

        Raises:
            PmlError: with file, line and column; nothing is computed then.
        """
        many = [prompts] if isinstance(prompts, (str, os.PathLike, PmlPrompt)) else list(prompts)
        compiled = [self.schemas.compile(prompt, isolation) for prompt in many]
        each = params_for_each(sampling_params, len(many))
        texts = [prompt if isinstance(prompt, str) else None for prompt in many]
        requests = [self.pml_request(*one) for one in zip(compiled, each, texts, strict=True)]
        self._validate(requests)
        for one in compiled:
            self.engine.prefetch_modules(self.schemas.alternatives(one))
        outputs = {o.request_id: o for o in self._run(sorted(requests, key=_imported))}
        return [outputs[request.request_id] for request in requests]

    def encode_schema(self, name: str, isolation: str = "anchored") -> Iterator[RequestOutput]:
        """Compute all cached text of a schema, so that it is there when a prompt comes: in KV
        memory while that has room, and in the tiers below it. What a tier has already is checked
        and not computed again.

        Returns:
            an output for each segment, as they are done.
        """
        prompts = encoding_prompts(self.schemas.encoding(name, isolation))
        requests = [self.pml_request(prompt, ONE_TOKEN) for prompt in prompts]
        for request in requests:
            self.engine.validate(request)
        yield from self.engine.run(requests)
        if self.engine.tiers is not None:
            self.engine.tiers.flush()

    def pml_request(
        self, compiled: CompiledPrompt, params: SamplingParams, markup: str | None = None
    ) -> Request:
        """The engine's request for a compiled prompt."""
        request = self._request(compiled.ordered_token_ids.tolist(), markup, params)
        return dataclasses.replace(request, pml=compiled)

    def plan(self, prompts: Prompts, params: Sequence[SamplingParams]) -> JobPlan:
        """Groups and order for prompts that are all known."""
        lengths = output_lengths(prompts, params, self.engine.max_model_len)
        return planner_of(self.options, self.kv_tokens)(prompts, output_lengths=lengths)

    @property
    def kv_tokens(self) -> int:
        """Tokens that KV memory holds."""
        pool = self.engine.cache.pool
        return pool.num_pages * pool.page_size

    def tokenize(
        self, prompts: Sequence[Prompt], *, parse_special: bool = True
    ) -> list[Sequence[int]]:
        """Token ids of prompts, as `generate` reads them."""
        return [ids.listed for ids in self._ids(prompts, parse_special)]

    def _ids(self, prompts: Sequence[Prompt], parse_special: bool) -> list[_Ids]:
        check_parse_special(parse_special)
        raw = [_raw(prompt, parse_special) for prompt in prompts]
        texts = [one for one in raw if isinstance(one, RawText)]
        tokenizer = self._bounded_tokenizer("text") if texts else None
        try:
            encoded = tokenizer.encode_batch(texts) if tokenizer is not None else []
        except RequestError:
            assert tokenizer is not None
            for i, one in enumerate(raw):
                with named_one("prompt", i, len(raw)):
                    tokenizer.encode_batch([one] if isinstance(one, RawText) else [])
            raise
        found = iter(encoded)
        ids = []
        for i, one in enumerate(raw):
            with named_one("prompt", i, len(raw)):
                ids.append(_ids_of(next(found) if isinstance(one, RawText) else one))
        return ids

    def _planned(
        self,
        ids: list[_Ids],
        texts: Sequence[str | None],
        params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> tuple[list[Request], RunningOrder]:
        """Validated requests, in the prompts' order, and the order in which they begin."""
        each, arrays = params_for_each(params, len(ids)), [one.array for one in ids]
        requests = [
            self._request(one.listed, text, its, one.array)
            for one, text, its in zip(ids, texts, each, strict=True)
        ]
        self._validate(requests)
        return requests, RunningOrder(self.plan(arrays, each))

    def _answer(
        self,
        ids: list[_Ids],
        texts: Sequence[str | None],
        params: SamplingParams | Sequence[SamplingParams] | None,
        *,
        use_tqdm: bool,
    ) -> list[Answer]:
        requests, order = self._planned(ids, texts, params)
        if not requests:
            return []
        with progress_bar("answering", len(requests), shown=use_tqdm) as advance:
            outputs = []
            for answer in self._with_index(self._run(planned(requests, order)), requests, order):
                outputs.append(answer)
                advance()
        return sorted(outputs, key=lambda answer: answer.index)

    def _with_index(
        self, answers: Iterator[Answer], requests: Sequence[Request], order: RunningOrder
    ) -> Generator[Answer]:
        """Answers with their prompt's index; the order learns the lengths of those that ended."""
        position = {request.request_id: i for i, request in enumerate(requests)}
        num_open = len(requests)
        for answer in answers:
            answer.index = position[answer.request_id]
            if answer.finished:
                num_open -= 1
                order.note(answer.index, answer.metrics.num_output_tokens)
            yield answer
        if num_open:
            raise ConfigError(f"the LLM of {self.name} was closed before all was answered")

    def _run(
        self, requests: Iterable[Request], output_kind: OutputKind = "cumulative"
    ) -> Iterator[Answer]:
        """The engine's answers, with log-probabilities as users have them."""
        self.engine.tell_ranks()
        run = self.engine.run(requests)
        self._running = weakref.ref(run)
        outputs = _news(run) if output_kind == "delta" else run
        describe = partial(described, self.tokenizer)
        return (Answer.of(output, describe) for output in outputs)

    def _validate(self, requests: Sequence[Request]) -> None:
        for i, request in enumerate(requests):
            with named_one("prompt", i, len(requests)):
                self.engine.validate(request)

    def _request(
        self,
        ids: Sequence[int],
        text: str | None,
        params: SamplingParams,
        array: NDArray[np.integer] | None = None,
    ) -> Request:
        self._count += 1
        return Request(
            request_id=f"request-{self._count}",
            prompt_token_ids=ids,
            prompt_array=array,
            prompt=text,
            params=params,
        )

    def _need_tokenizer(self, what: str) -> Tokenizer:
        if self.tokenizer is None:
            raise RequestError(
                f"{what} needs a tokenizer, and {self.path} has none: give token ids"
            )
        return self.tokenizer

    def _bounded_tokenizer(self, what: str) -> BoundedTokenizer:
        return BoundedTokenizer(self._need_tokenizer(what), self.engine.max_model_len)


class _Awake(Iterator[Answer]):
    """Answers of an engine, refused while it sleeps. A generator that raises would have ended."""

    def __init__(self, engine: Engine, answers: Generator[Answer]) -> None:
        self._engine = weakref.ref(engine)  # an LLM that is closed lets it go
        self._answers = answers
        self._has_begun = False

    def __next__(self) -> Answer:
        engine = self._engine()
        if engine is not None and (not self._has_begun or engine.has_unfinished()):
            engine.residence.check_ready()
        del engine
        self._has_begun = True
        return next(self._answers)

    def close(self) -> None:
        """End what is unfinished."""
        self._answers.close()


def path_scores(output: RequestOutput) -> list[PathScores]:
    """The scores of a request with paths.

    Raises:
        OnestemError: the engine could not compute them.
    """
    if output.scores is None:
        reasons = [one.stop_reason for one in output.outputs if one.stop_reason is not None]
        raise OnestemError(f"no scores: {reasons[0] if reasons else 'the request was ended'}")
    return output.scores


def described(tokenizer: Tokenizer | None, entry: Mapping[int, float]) -> Logprobs:
    """A token's entry with ranks and texts. All but the last are the leading ones, in order."""
    assert isinstance(entry, RankedLogprobs)
    count = len(entry)
    ranks = [*range(1, count), max(count, entry.rank)]
    texts = [None] * count if tokenizer is None else map(tokenizer.token_text, entry)
    made = map(Logprob, entry.values(), ranks, texts)
    return dict(zip(entry, made, strict=True))


def check_parse_special(given: object) -> None:
    """Raise `RequestError` for what is neither true nor false."""
    if not isinstance(given, bool):
        raise RequestError(f"parse_special is {show(given)}, expected true or false")


def check_output_kind(kind: object) -> None:
    """Raise `RequestError` for what is no `OutputKind`."""
    if kind not in ("cumulative", "delta"):
        raise RequestError(f"output_kind is {show(kind)}, expected cumulative or delta")


def read_prompt(
    prompt: object,
    tokenizer: Tokenizer | None,
    max_model_len: int | None,
    parse_special: bool = True,
) -> tuple[str | None, list[int]]:
    """Text, if it was given, and token ids of one prompt.

    Args:
        max_model_len: None: it is not known yet.
        parse_special: see `LLM.generate`.
    """
    check_parse_special(parse_special)
    plain = _plain(prompt)
    if not isinstance(plain, str):
        return None, _ids_of(plain).listed
    if tokenizer is None:
        raise RequestError("text needs a tokenizer, and the model has none: give token ids")
    raw = RawText.of(plain, parse_special)
    tokenizer.check_raw(raw, max_model_len)
    return plain, _ids_of(tokenizer.encode_batch([raw])[0]).listed


def planned(requests: Sequence[Request], order: RunningOrder) -> Iterator[Request]:
    """The requests in the order in which they are to begin, each with its group set."""
    return (grouped(requests[index], order.plan, index) for index in order)


def grouped(request: Request, plan: JobPlan, index: int) -> Request:
    """The plan's request `index`, with its group set."""
    group = int(plan.group_of[index])
    return dataclasses.replace(
        request,
        group=group,
        group_prefix_tokens=plan.groups[group].prefix_tokens,
        group_only=plan.group_only,
    )


def several_prompts(prompts: object) -> list[Any]:
    """The prompts, of one or a list of them."""
    if isinstance(prompts, (str, Mapping)) or _is_ids(prompts):
        return [prompts]
    if isinstance(prompts, Iterable) and getattr(prompts, "ndim", 1) > 0:
        return list(prompts)
    raise RequestError(f"prompts is {show(prompts)}, expected a prompt or a list of prompts")


def _plain(prompt: Any) -> Any:
    """A prompt as text or ids, also from vLLM's object for it."""
    if not isinstance(prompt, Mapping):
        return prompt
    kinds = prompt.keys() & {"prompt", "prompt_token_ids"}
    if len(kinds) != 1 or len(prompt) != 1:
        raise RequestError(
            f"prompt is {show(dict(prompt))}, expected an object with prompt (text) or "
            "prompt_token_ids, and nothing else"
        )
    return prompt[kinds.pop()]


def _texts(prompts: Iterable[Any]) -> list[str | None]:
    return [prompt if isinstance(prompt, str) else None for prompt in prompts]


def _news(outputs: Iterator[RequestOutput]) -> Iterator[RequestOutput]:
    """Growing outputs, each reduced to what is new in it."""
    told: dict[str, dict[int, Told]] = {}
    for output in outputs:
        known = told.setdefault(output.request_id, {})
        pieces = [known.setdefault(one.index, Told()).news(one) for one in output.outputs]
        if output.finished:
            del told[output.request_id]
        yield dataclasses.replace(output, outputs=[one for one in pieces if one is not None])


@contextmanager
def named_one(what: str, index: int, count: int) -> Iterator[None]:
    """Have an error name the item, if there are several."""
    try:
        yield
    except RequestError as error:
        if count == 1:
            raise
        raise RequestError(f"{what} {index}: {error}") from error


def _imported(request: Request) -> tuple[str, ...]:
    """Keys of the modules that a request imports: requests with the same ones stand together."""
    assert request.pml is not None
    return tuple(segment.key for segment in request.pml.segments if segment.key)


def _check_list(name: str, value: object) -> None:
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        raise RequestError(f"{name} is {show(value)}, expected a list")


def _is_ids(prompts: object) -> bool:
    """Whether these are one prompt's ids, and not several prompts."""
    if isinstance(prompts, (np.ndarray, torch.Tensor)):
        return prompts.ndim == 1
    if isinstance(prompts, (bytes, bytearray, memoryview)):
        return True  # refused as such
    if not isinstance(prompts, Sequence) or len(prompts) == 0:
        return False
    first = prompts[0]
    return not isinstance(first, (str, Sequence, Mapping, np.ndarray, torch.Tensor))


class _Ids(NamedTuple):
    """Token ids of a prompt: as a sequence to hand on, and as an array to compute with."""

    listed: list[int]
    array: NDArray[np.int64]


def _raw(prompt: Any, parse_special: bool) -> Any:
    """A text as one that is tokenised as it stands; other values unchanged."""
    return RawText.of(prompt, parse_special) if isinstance(prompt, str) else prompt


def _raw_or_ids(prompt: Prompt, parse_special: bool) -> RawText | NDArray[np.int64]:
    raw = _raw(prompt, parse_special)
    return raw if isinstance(raw, RawText) else _ids_of(raw).array


def _ids_of(prompt: object) -> _Ids:
    """Token ids of a prompt that is no text."""
    if isinstance(prompt, (np.ndarray, torch.Tensor)):
        return _ids_of_array(prompt)
    if not isinstance(prompt, Sequence) or isinstance(prompt, (bytes, bytearray, memoryview)):
        raise RequestError(
            f"prompt is {type(prompt).__name__} ({str(prompt)[:40]}), expected text or token ids"
        )
    try:
        ids = np.frombuffer(array("q", prompt), np.int64)
    except (TypeError, OverflowError):
        bad = next(token for token in prompt if not _is_id(token))
    else:
        # A boolean is an integer for Python, and a mistake here.
        few = np.flatnonzero((ids == 0) | (ids == 1)).tolist()
        bad = next((prompt[i] for i in few if not _is_id(prompt[i])), None)
        if bad is None:
            if len(prompt) == 0 or type(prompt[0]) is int:
                return _Ids(list(prompt), ids)
            if all(map(_is_id, prompt)):  # numpy's
                return _Ids(ids.tolist(), ids)
            bad = next(token for token in prompt if not _is_id(token))
    raise RequestError(
        f"prompt holds {str(bad)[:40]!r} ({type(bad).__name__}), expected token ids (integers)"
    )


def _is_id(token: object) -> bool:
    whole = isinstance(token, Integral) and not isinstance(token, bool)
    return whole and -(2**63) <= int(cast(int, token)) < 2**63


def _ids_of_array(prompt: NDArray[Any] | torch.Tensor) -> _Ids:
    if isinstance(prompt, torch.Tensor):
        whole = not (prompt.is_floating_point() or prompt.is_complex())
        whole = whole and prompt.dtype != torch.bool
    else:
        whole = bool(np.issubdtype(prompt.dtype, np.integer))
    if prompt.ndim != 1 or not whole:
        raise RequestError(
            f"prompt is an array of {prompt.dtype} with shape {list(prompt.shape)}, expected "
            "integers with one dimension"
        )
    array = prompt.cpu().numpy() if isinstance(prompt, torch.Tensor) else prompt
    if array.dtype.itemsize == 8 and array.dtype.kind == "u":
        return _ids_of(array.tolist())  # some may be too large
    return _Ids(array.tolist(), array.astype(np.int64))


def params_for_each(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    """Parameters of `count` prompts, from a caller's one, one each, or None."""
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params] * count
    if not isinstance(params, Sequence) or not all(isinstance(p, SamplingParams) for p in params):
        raise RequestError(
            f"sampling_params is {show(params)}, expected SamplingParams, or a list of them"
        )
    if len(params) != count:
        raise RequestError(
            f"{len(params)} sampling parameters for {count} prompts: give one, or one each"
        )
    return list(params)


def pick_device(name: str) -> torch.device:
    """The device of a name; `auto` is a GPU where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device is {name!r}, expected auto, cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda") or (device.type == "cpu" and device.index):
        raise ConfigError(f"device is {name!r}, expected auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device is {name!r}, and torch {torch.__version__} sees no GPU: use cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device is {name!r}, there are {torch.cuda.device_count()} GPUs")
    return torch.device("cpu") if device.type == "cpu" else device  # cpu:0 is the CPU


def pick_dtype(name: str, config: ModelConfig, device: torch.device) -> torch.dtype:
    """The dtype of a name; `auto` is the model's, but float32 on a CPU without bf16 products."""
    if name == "auto":
        slow = device.type == "cpu" and not torch.ops.mkldnn._is_mkldnn_bf16_supported()
        name = "float32" if slow else config.torch_dtype
    if name not in ("float32", "bfloat16", "float16"):
        raise ConfigError(f"dtype is {name!r}, expected auto, float32, bfloat16 or float16")
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def activation_bytes(
    config: ModelConfig, dtype: torch.dtype, rows: int, device: torch.device
) -> int:
    """About the bytes of a step of `rows` rows besides weights and KV: a layer's intermediates, and
    for the maximum of decoding rows twice the logits, and penalties. The penalties of a row are a
    bit for each token of the vocabulary, and a list of the sampled ones."""
    heads = max((config.num_q_heads + one.num_kv_heads) * one.head_dim for one in config.heads)
    inner = max(config.mlp_size(layer) for layer in range(config.num_layers))
    wide = 3 * inner + 4 * config.hidden_size + 4 * heads
    wide += 3 * config.num_layers * config.token_vectors
    if config.experts is not None:
        size, top_k = config.experts.intermediate_size, config.experts.top_k
        wide += top_k * (3 * size + 2 * config.hidden_size) + 3 * config.experts.shared_size
    row = 2 * config.vocab_size * 4 + config.vocab_size // 8 + PENALTY_LIST_BYTES
    logit_rows = 0
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
        logit_rows = largest_decode(config.vocab_size, memory)
    return rows * wide * dtype.itemsize + logit_rows * row


def largest_decode(vocab_size: int, device_memory: int) -> int:
    """Maximum rows of a step with logits, which memory is left for: 4,096 where twice their logits
    (float32) take at most a sixteenth of the device's memory (bytes), else 2,048."""
    return 4096 if 16 * 2 * 4096 * 4 * vocab_size <= device_memory else 2048


def set_threads(threads: int | None, ranks: int = 1) -> None:
    """Set how many threads compute on a CPU (see `EngineOptions`), in each of `ranks` processes."""
    share = max(1, usable_cores() // ranks)
    if threads is not None:
        torch.set_num_threads(threads)
    elif "OMP_NUM_THREADS" not in os.environ and torch.get_num_threads() > share:
        torch.set_num_threads(share)


def check_ranks(options: EngineOptions, config: ModelConfig) -> None:
    """Raise `ConfigError` for a model that does not divide over its devices, and for tiers of
    modules where each device has a part of every module."""
    if options.tensor_parallel_size == 1:
        return
    part_of(config, Ranks(0, options.tensor_parallel_size, None))
    for name in ("module_host_memory", "module_disk"):
        if getattr(options, name):
            raise ConfigError(
                f"{name} is {getattr(options, name)}, and tensor_parallel_size is "
                f"{options.tensor_parallel_size}: modules stay in KV memory then, leave it out"
            )


def pages_of(memory: int, page_size: int, page_bytes: int) -> int:
    """Pages that fit in KV memory, one at least."""
    if memory < page_bytes:
        raise ConfigError(
            f"kv_memory is {memory} bytes, a page of {page_size} tokens takes {page_bytes}: "
            "raise kv_memory"
        )
    return memory // page_bytes


def kv_memory_bytes(
    size: str | int,
    device: torch.device,
    beside: int = 0,
    *,
    loading: int = 0,
    ranks: int = 1,
    most: int | None = None,
) -> int:
    """Bytes of KV memory to take on a device.

    Args:
        beside: bytes that must stay free at least. loading: bytes of weights not loaded yet.
        ranks: processes that share the memory of a CPU.
        most: bytes free on another GPU that is to have as much.

    Raises:
        ConfigError: there is less than `size` asks for.
    """
    ram = ram_bytes()
    there = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else ram // ranks
    there = there if most is None else min(there, most)
    if loading > there:
        have = f"{device} has {there / GIB:.1f} GiB"
        raise ConfigError(f"the weights take {loading / GIB:.1f} GiB, {have}: take a smaller model")
    there -= loading if device.type == "cuda" else 0
    if size != "auto":
        wanted = parse_memory(size)
        if wanted > there:
            raise ConfigError(f"kv_memory is {size}, {device} has {there / GIB:.1f} GiB: lower it")
        return wanted
    if device.type == "cuda":
        return max(0, min(int(GPU_SHARE * there), there - int(1.25 * beside)))
    return min(4 * GIB // ranks, there // 4)
