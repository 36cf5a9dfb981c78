"""`LLM`: the offline interface for Python, with vLLM's names."""

from __future__ import annotations

import gc
import inspect
import os
import weakref
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypedDict, Unpack, cast, overload

import numpy as np
import torch
from numpy.typing import NDArray

from onestem.answers import (
    AwakeAnswers,
    OutputKind,
    check_output_kind,
    in_pieces,
    path_scores,
    with_texts,
)
from onestem.batch import output_lengths
from onestem.beside_vllm import Beside, refuses_vllms
from onestem.build import build_engine
from onestem.engine.engine import Engine
from onestem.errors import ConfigError, RequestError
from onestem.garbage import collecting_less
from onestem.models.config import ModelConfig
from onestem.models.find import find_model
from onestem.openai.forms import Tools
from onestem.openai.write import message_of
from onestem.options import EngineOptions, takes
from onestem.planner import JobPlan, Prompts, RunningOrder, planned, planner_of
from onestem.pml import CompiledPrompt, Layout, Library, Schema
from onestem.progress import progress_bar
from onestem.prompts import (
    AnyPrompt,
    PmlSource,
    Prompt,
    PromptIds,
    PromptReader,
    ScoreItems,
    named_one,
    params_for_each,
    several_sources,
)
from onestem.request import (
    ONE_TOKEN,
    Answer,
    Request,
    RequestOutput,
    SamplingParams,
)
from onestem.scores import Score, ScoreTree

Document = str | Mapping[str, Any]


class ChatOptions(TypedDict, total=False):
    """Arguments of `LLM.chat` that say how its prompts are written."""

    tools: Sequence[Mapping[str, Any]] | None
    tool_choice: str | Mapping[str, Any] | None
    add_generation_prompt: bool
    continue_final_message: bool
    chat_template_kwargs: Mapping[str, Any] | None
    documents: Sequence[Document] | Sequence[Sequence[Document]] | None
    repair: float | None
    lead_in: Document | None


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
        self.asked = options
        self.name = str(options.model)
        self.path = find_model(self.name)
        self.config = ModelConfig.from_directory(self.path)
        engine = build_engine(options, self.path)
        self.options = engine.options
        self.team = engine.team
        self.decoder = engine.weights.decoder
        self.tokenizer = engine.requests.tokenizer
        self.device, self.dtype = torch.device(self.options.device), self.decoder.dtype
        self._engine: Engine | None = engine
        self._running: weakref.ref[Generator[RequestOutput]] | None = None
        self._count = 0
        self._reader = PromptReader(
            self.tokenizer,
            self.path,
            max_model_len=engine.max_model_len,
            max_positions=self.config.max_position_embeddings,
        )

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
                ids}`. The names of control tokens in a text are these tokens. BOS appears once: a
                text may begin with it.
            sampling_params: one for all or one each.
            parse_special: False: the names of control tokens are characters.
            use_tqdm: show a bar at a terminal (vLLM's name for it).

        Raises:
            RequestError: a prompt cannot be answered; of several, it says which (counted from 0).
                Nothing is computed then.
        """
        ids, texts = self._reader.read(prompts, parse_special)
        return self._answer(ids, texts, sampling_params, use_tqdm=use_tqdm)

    @refuses_vllms
    def stream(
        self,
        prompts: AnyPrompt | Sequence[AnyPrompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        parse_special: bool = True,
        output_kind: OutputKind = "cumulative",
    ) -> AwakeAnswers:
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
        ids, texts = self._reader.read(prompts, parse_special)
        return self._stream(ids, texts, sampling_params, output_kind)

    def _stream(
        self,
        ids: list[PromptIds],
        texts: Sequence[str | None],
        params: SamplingParams | Sequence[SamplingParams] | None,
        output_kind: OutputKind,
    ) -> AwakeAnswers:
        requests, order = self._planned(ids, texts, params)
        streams = [replace(request, stream=True) for request in requests]
        answers = self._run(planned(streams, order), output_kind) if requests else iter(())
        return AwakeAnswers(self.engine, self._with_index(answers, requests, order))

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
        documents: Sequence[Document] | Sequence[Sequence[Document]] | None = None,
        repair: float | None = None,
        lead_in: Document | None = None,
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
            documents: texts, or objects with a `text` and perhaps a `title`, that all conversations
                are about; or a list of them for each. They are where the template has its
                `documents`, else before the last message of the user.
            repair: the share of the documents' tokens that is computed with all before them in
                sight, from 0 to 1; None: 1.
            lead_in: a document like them, after which all but the first are stored (docs/pml.md).
            use_tqdm: show a bar at a terminal.

        Raises:
            RequestError: as `generate`.
        """
        options: ChatOptions = {
            "tools": tools,
            "tool_choice": tool_choice,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "chat_template_kwargs": chat_template_kwargs,
            "documents": documents,
            "repair": repair,
            "lead_in": lead_in,
        }
        ids, each = self._chats(messages, sampling_params, options)
        return self._answer(ids, [None] * len(ids), each, use_tqdm=use_tqdm)

    @refuses_vllms
    def stream_chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        output_kind: OutputKind = "cumulative",
        **options: Unpack[ChatOptions],
    ) -> AwakeAnswers:
        """`chat`, with outputs as they grow, as `stream` gives them. Other arguments are those of
        `chat`.

        Raises:
            RequestError: as `chat` and `stream`.
        """
        if unknown := options.keys() - ChatOptions.__annotations__.keys():
            raise TypeError(f"stream_chat has no argument {unknown.pop()!r}")
        check_output_kind(output_kind)
        ids, each = self._chats(messages, sampling_params, options)
        return self._stream(ids, [None] * len(ids), each, output_kind)

    def _chats(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        options: ChatOptions,
    ) -> tuple[list[PromptIds], list[SamplingParams]]:
        """Token ids of conversations, and the parameters of each."""
        ids, tools = self._reader.chats(messages, {"documents": None, **options})
        if not ids:
            return [], []
        each = params_for_each(sampling_params, len(ids))
        return ids, self._reader.with_calls(each, tools, ids)

    def assistant_message(
        self,
        answer: RequestOutput,
        index: int = 0,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> dict[str, Any]:
        """An answer of a chat as OpenAI's message: `content`, and `reasoning_content` (also as
        `reasoning`) and `tool_calls` if there are any. The conversation may go on with it.

        Args:
            index: which of the answer's `outputs`.
            tools: those of the chat. Some families write texts without quotes (Qwen3-Coder, GLM):
                the tools say which arguments are texts.
        """
        tokenizer = self._reader.need_tokenizer("chat")
        texts = Tools(allowed=dict(enumerate(map(dict, tools)))).texts
        reading = tokenizer.reading(answer.prompt_token_ids, texts)
        told = message_of(answer.request_id, answer.outputs[index], reading)
        message: dict[str, Any] = told["message"]
        return message

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
        if completions is None:
            most = self.engine.max_model_len
            items = self._reader.whole_texts(prompts, parse_special, most)
            return list(map(Score.joined, self._scores(items, len(prompts))))
        items = self._reader.completions(prompts, completions, parse_special)
        return self._scores(items, len(prompts))

    def _scores(self, items: ScoreItems, num_prompts: int) -> list[list[Score]]:
        """The scores of each prompt's items."""
        scores: list[list[Score]] = [[] for _ in range(num_prompts)]
        if not items.ids:
            return scores
        vocab_size = self.config.vocab_size
        for ids, i in zip(items.ids, items.whose, strict=True):
            bad = ids[(ids < 0) | (ids >= vocab_size)]
            if len(bad):
                raise RequestError(
                    f"prompt {i}: token id {int(bad[0])}, expected ids from 0 to {vocab_size - 1}"
                )
        tree = ScoreTree(items.ids, items.starts)
        plan = planner_of(self.options, self.kv_tokens)(tree.leaves)
        paths = tree.paths(RunningOrder(plan))
        requests = [
            replace(self._request(cast(Any, leaf), None, ONE_TOKEN), paths=(path,))
            for leaf, path in zip(tree.leaves, paths, strict=True)
        ]
        for i, leaf in zip(items.whose, tree.leaf_of, strict=True):
            if len(tree.leaves[leaf]) > self.engine.max_model_len:
                with named_one("prompt", i, items.whose[-1] + 1):
                    self.engine.requests.validate(requests[leaf])
        outputs = {
            output.request_id: output
            for output in self.engine.run(planned(requests, RunningOrder(plan)))
        }
        found = [path_scores(outputs[one.request_id])[0] for one in requests]
        for i, score in zip(items.whose, tree.scores(found), strict=True):
            scores[i].append(score)
        return scores

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
        made = self._reader.pml_completions(prompts, completions, isolation)
        requests = [
            replace(self.pml_request(compiled, ONE_TOKEN), paths=tuple(paths))
            for compiled, _, paths in made
        ]
        self._validate(requests)
        outputs = {o.request_id: o for o in self.engine.run(sorted(requests, key=_imported))}
        return [
            tree.scores(path_scores(outputs[request.request_id]))
            for (_, tree, _), request in zip(made, requests, strict=True)
        ]

    @property
    def weights_version(self) -> int:
        """Version of the weights; those of the checkpoint are version 0."""
        return self.engine.weights.version

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
        return self.engine.weights.update(named_tensors, version)

    def sleep(self, level: int = 1) -> None:
        """Free the device's memory for other uses: KV memory and the weights. Weights wait in host
        memory (level 1; on a CPU they stay where they are) or are dropped (level 2;
        `update_weights` must give each of them before the next request). Requests are refused until
        `wake_up`; an answer that runs goes on then."""
        self.engine.weights.sleep(level)

    def wake_up(self, tags: Collection[str] | None = None) -> None:
        """Take the memory again.

        Args:
            tags: `weights`, `kv_cache` or both; None: both.
        """
        self.engine.weights.wake_up(tags)

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Drop the keys and values that are cached.

        Args:
            reset_running_requests: also those that running requests read; they are recomputed.

        Returns:
            whether nothing is left but pinned prefixes.
        """
        return self.engine.reset_prefix_cache(reset_running_requests=reset_running_requests)

    @property
    def schemas(self) -> Library:
        """PML schemas that prompts may name."""
        return self._reader.schemas

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
        many = several_sources(prompts)
        compiled = [self.schemas.compile(prompt, isolation) for prompt in many]
        each = params_for_each(sampling_params, len(many))
        texts = [prompt if isinstance(prompt, str) else None for prompt in many]
        requests = [self.pml_request(*one) for one in zip(compiled, each, texts, strict=True)]
        self._validate(requests)
        for one in compiled:
            self.engine.requests.prefetch_modules(self.schemas.alternatives(one))
        outputs = {o.request_id: o for o in self._run(sorted(requests, key=_imported))}
        return [outputs[request.request_id] for request in requests]

    def encode_schema(self, name: str, isolation: str = "anchored") -> Iterator[RequestOutput]:
        """Compute all cached text of a schema, so that it is there when a prompt comes: in KV
        memory while that has room, and in the tiers below it. What a tier has already is checked
        and not computed again.

        Returns:
            an output for each segment, as they are done.
        """
        prompts = self.schemas.encoding(name, isolation).prompts()
        requests = [self.pml_request(prompt, ONE_TOKEN) for prompt in prompts]
        for request in requests:
            self.engine.requests.validate(request)
        yield from self.engine.run(requests)
        if self.engine.tiers is not None:
            self.engine.tiers.stores.flush()

    def pml_request(
        self, compiled: CompiledPrompt, params: SamplingParams, markup: str | None = None
    ) -> Request:
        """The engine's request for a compiled prompt."""
        request = self._request(compiled.ordered_token_ids.tolist(), markup, params)
        return replace(request, pml=compiled)

    def plan(self, prompts: Prompts, params: Sequence[SamplingParams]) -> JobPlan:
        """Groups and order for prompts that are all known."""
        lengths = output_lengths(prompts, params, self.engine.max_model_len)
        return planner_of(self.options, self.kv_tokens)(prompts, output_lengths=lengths)

    @property
    def kv_tokens(self) -> int:
        """Tokens that KV memory holds."""
        return self.engine.cache.pool.num_tokens

    def tokenize(
        self, prompts: Sequence[Prompt], *, parse_special: bool = True
    ) -> list[Sequence[int]]:
        """Token ids of prompts, as `generate` reads them."""
        return [ids.listed for ids in self._reader.ids(prompts, parse_special)]

    def _planned(
        self,
        ids: list[PromptIds],
        texts: Sequence[str | None],
        params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> tuple[list[Request], RunningOrder]:
        """Validated requests, in the prompts' order, and the order in which they begin."""
        each, arrays = params_for_each(params, len(ids)), [one.array for one in ids]
        requests = [
            self._request(one.listed, text, its, one.array, documents=one.documents, **one.around)
            for one, text, its in zip(ids, texts, each, strict=True)
        ]
        self._validate(requests)
        return requests, RunningOrder(self.plan(arrays, each))

    def _answer(
        self,
        ids: list[PromptIds],
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
        self.engine.launcher.sampler.tell_ranks()
        run = self.engine.run(requests)
        self._running = weakref.ref(run)
        outputs = in_pieces(run) if output_kind == "delta" else run
        describe = partial(with_texts, self.tokenizer)
        return (Answer.of(output, describe) for output in outputs)

    def _validate(self, requests: Sequence[Request]) -> None:
        for i, request in enumerate(requests):
            with named_one("prompt", i, len(requests)):
                self.engine.requests.validate(request)

    def _request(
        self,
        ids: Sequence[int],
        text: str | None,
        params: SamplingParams,
        array: NDArray[np.integer] | None = None,
        **more: Any,
    ) -> Request:
        self._count += 1
        return Request(
            request_id=f"request-{self._count}",
            prompt_token_ids=ids,
            prompt_array=array,
            prompt=text,
            params=params,
            **more,
        )


def _imported(request: Request) -> tuple[str, ...]:
    """Keys of the modules that a request imports: requests with the same ones are adjacent."""
    assert request.pml is not None
    return tuple(segment.key for segment in request.pml.segments if segment.key)
