"""`Replicas`: many engines of one model that answer a job together."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence

from onestem.batch import output_lengths
from onestem.beside_vllm import refuses_vllms
from onestem.build import check_ranks
from onestem.checked import show
from onestem.engine.grammar.compiler import GrammarCompiler
from onestem.engine.outputs import EngineStats
from onestem.engine.schedule.admission import check_for, check_format
from onestem.engine.text.tokenizer import Tokenizer
from onestem.errors import ConfigError, RequestError
from onestem.forecasts import JobWatch
from onestem.models.config import GenerationDefaults, ModelConfig
from onestem.models.find import find_model
from onestem.options import EngineOptions
from onestem.planner import Planned, RunningOrder, planned, planner_of
from onestem.pml import Layout, Library, Schema
from onestem.prompts import Prompt, PromptReader, named_one, params_for_each
from onestem.replicas.dealer import Dealer
from onestem.replicas.ray import RayCrew
from onestem.replicas.worker import Facts
from onestem.request import Request, RequestOutput, SamplingParams


def _say(line: str) -> None:
    print(f"onestem: {line}", file=sys.stderr)


class Replicas:
    """Engines of one model, each a Ray actor with GPUs of its own or a part of the cores. This
    process holds no weights: it plans, deals and writes.

    It is separate from `LLM`, which is one engine in this process with one cache, pinned prefixes
    and statistics: many engines have no single one of these.

    Args:
        num_replicas: engines to start; late ones join in.
        options: of each engine.
        address: of a Ray cluster; None: Ray is started on this machine. A cluster that this process
            has already joined is used instead.
        tell: gets one line for each replica that cannot start or dies.

    Attributes:
        options: as resolved by the first engine.
        asked: the options as they were given.

    Raises:
        OnestemError: Ray cannot be used, or no engine can start.
    """

    def __init__(
        self,
        num_replicas: int,
        options: EngineOptions,
        *,
        address: str | None = None,
        tell: Callable[[str], object] = _say,
    ) -> None:
        if type(num_replicas) is not int or num_replicas < 1:
            raise ConfigError(
                f"replicas is {show(num_replicas)}, expected an integer of at least 1"
            )
        self.name = str(options.model)
        self.path = find_model(self.name)
        self.config = ModelConfig.from_directory(self.path)
        self.tokenizer = Tokenizer.from_directory(self.path, options.template_text)
        check_ranks(options, self.config)
        self._crew = RayCrew(options, num_replicas, address)
        try:
            self._dealer = Dealer(self._crew, num_replicas, tell)
            facts = self._dealer.first()
        except BaseException:
            self._crew.close()
            raise
        self.asked, self.options, self._target = options, facts.options, facts.target
        assert facts.options.max_model_len is not None  # settled by the engine
        self._max_model_len = facts.options.max_model_len
        self.num_replicas = num_replicas
        self._count = 0
        self._is_closed = False
        self._pid = os.getpid()
        self._answering = threading.Lock()
        self._reader = PromptReader(
            self.tokenizer,
            self.path,
            max_model_len=self._max_model_len,
            max_positions=self.config.max_position_embeddings,
        )
        self._grammars: GrammarCompiler | None = None
        if self.tokenizer is not None:
            size = self.config.vocab_size
            defaults = GenerationDefaults.from_directory(self.path)
            eos = defaults.ends(self.tokenizer.end_ids, size)
            self._grammars = GrammarCompiler(self.tokenizer, size, eos or None)

    @property
    def replicas(self) -> list[Facts]:
        """The replicas that run."""
        return self._dealer.facts

    @property
    def kv_tokens(self) -> int:
        """Tokens that the first replica's KV memory holds."""
        return self._target.kv_tokens

    def watch(self) -> JobWatch:
        """Compares a job with its prediction, after it has run."""
        most = self._max_model_len
        return JobWatch(self._target, self.options.share, self.stats, most, self.num_replicas)

    def stats(self) -> EngineStats:
        """Sums over all engines; `peak_kv_tokens` is that of the fullest one."""
        return self._dealer.stats()

    @property
    def schemas(self) -> Library:
        """PML schemas that prompts may name."""
        return self._reader.schemas

    def add_schema(self, schema: Schema | str | os.PathLike[str]) -> Layout:
        """Make a PML schema known; see `LLM.add_schema`."""
        return self.schemas.add(schema)

    def validate(self, request: Request) -> None:
        """Raise `RequestError` for a request that can never be answered."""
        check_for(
            self.options,
            request,
            self.config,
            self.tokenizer,
            max_model_len=self._max_model_len,
            kv_tokens=self.kv_tokens,
        )
        if self._grammars is not None:
            check_format(self._grammars.compile, request)

    def run(self, requests: Planned | Iterable[Request]) -> Iterator[RequestOutput]:
        """Answer requests; yields outputs as they finish. Planned requests are dealt by groups.

        Raises:
            ConfigError: the replicas are closed.
            JobError: no replica is left.
        """
        if self._is_closed:
            raise ConfigError(f"the replicas of {self.name} are closed: make others")
        return self._dealer.run(requests)

    @refuses_vllms
    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        parse_special: bool = True,
    ) -> list[RequestOutput]:
        """Answer prompts, planned together; outputs in the prompts' order.

        Args:
            prompts: as `LLM.generate` takes them.
            sampling_params: one for all, or one each. Log-probabilities are refused: they would
                lack the ranks and texts that `LLM.generate` gives.
            parse_special: see `LLM.generate`.

        Raises:
            RequestError: a prompt cannot be answered; names the prompt. Nothing is computed then.
                Or another thread's call is being answered.
            ConfigError: the process is a fork, or the replicas are closed.
            JobError: no replica is left.
        """
        if os.getpid() != self._pid:
            raise ConfigError("this process is a fork of the one with the replicas: make others")
        if not self._answering.acquire(blocking=False):
            raise RequestError(
                "the replicas answer another call: let it end first, or give all prompts at once"
            )
        try:
            requests = self._requests(prompts, sampling_params, parse_special)
            return self._answered(requests) if requests else []
        finally:
            self._answering.release()

    def _answered(self, requests: list[Request]) -> list[RequestOutput]:
        ids = [request.prompt_token_ids for request in requests]
        lengths = output_lengths(ids, (request.params for request in requests), self._max_model_len)
        order = RunningOrder(planner_of(self.options, self.kv_tokens)(ids, output_lengths=lengths))
        place = {request.request_id: i for i, request in enumerate(requests)}
        outputs = {}
        for output in self.run(planned(requests, order)):
            outputs[output.request_id] = output
            order.note(place[output.request_id], output.metrics.num_output_tokens)
        return [outputs[request.request_id] for request in requests]

    def _requests(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        parse_special: bool,
    ) -> list[Request]:
        ids, texts = self._reader.read(prompts, parse_special)
        each = params_for_each(sampling_params, len(ids))
        requests = []
        for i, (one, text, params) in enumerate(zip(ids, texts, each, strict=True)):
            with named_one("prompt", i, len(ids)):
                if params.logprobs is not None or params.prompt_logprobs is not None:
                    raise RequestError(
                        "replicas give no log-probabilities: use LLM, or a batch file"
                    )
                self._count += 1
                requests.append(
                    Request(
                        request_id=f"request-{self._count}",
                        prompt_token_ids=one.listed,
                        prompt=text,
                        params=params,
                    )
                )
                self.validate(requests[-1])
        return requests

    def close(self) -> None:
        """End the engines, and Ray if it was started here. Closing twice is fine."""
        self._is_closed = True
        if self._grammars is not None:
            self._grammars.close()
        self._crew.close()

    def __enter__(self) -> Replicas:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
