"""The answers that requests get from an engine that nobody else asks."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onestem.errors import OnestemError
from onestem.llm import LLM
from onestem.openai.read import Asked, Prompt, read_body, read_object
from onestem.openai.write import ResponseFormat, answer_body
from onestem.request import CompletionOutput, Request, RequestOutput
from onestem.server.errors import ApiError
from onestem_lab.serve.hostile_answers import Reply, choices_of
from onestem_lab.serve.hostile_pool import CHATS, PREFIXES, SCHEMAS, Case

if TYPE_CHECKING:
    from torch import Generator, Tensor

__all__ = ["Alone", "clear_cases", "shaken_model"]

# What weights are changed by, relatively: some ten times what rounding does to logits.
SHAKEN = 1e-5


class Alone:
    """An engine that answers requests one by one; it knows the server's prefixes and schemas. It
    has one thread: barriers would wait for whatever else the machine does.

    Args:
        options: of `LLM`.
    """

    def __init__(self, **options: Any) -> None:
        self._llm = LLM(**options, threads=1)
        self._numbers = count()
        for markup in SCHEMAS.values():
            self._llm.add_schema(markup)

    def __enter__(self) -> Alone:
        return self

    def __exit__(self, *error: object) -> None:
        self._llm.close()

    def answered(self, asked: Sequence[Case]) -> list[Case]:
        """The same requests with their answers."""
        return [dataclasses.replace(one, expected=self.answer(one)) for one in asked]

    def answer(self, case: Case) -> Reply:
        """An answer, or a refusal."""
        try:
            asked = read_body(
                "chat" if case.path == CHATS else "completion",
                read_object(json.dumps(case.body).encode()),
            )
            requests = [self._request(asked, prompt) for prompt in asked.prompts]
            for request in requests:
                self._llm.engine.requests.validate(request)
        except (OnestemError, ApiError) as error:
            return Reply(status=400, error=str(error))
        outputs = [output for one in requests for output in self._llm.engine.run([one])]
        failed = [one for output in outputs for one in output.outputs if _failed(one)]
        return _refusal(failed[0]) if failed else self._reply(asked, outputs)

    def _request(self, asked: Asked, prompt: Prompt) -> Request:
        name = f"alone-{next(self._numbers)}"
        if prompt.pml is None:
            ids = self._ids(prompt, asked.prefix)
            return Request(request_id=name, prompt_token_ids=ids, params=asked.params)
        compiled = self._llm.schemas.compile(prompt.pml, prompt.isolation)
        request = self._llm.pml_request(compiled, asked.params)
        return dataclasses.replace(request, request_id=name)

    def _ids(self, prompt: Prompt, prefix: str | None) -> list[int]:
        tokenizer = self._llm.tokenizer
        assert tokenizer is not None
        if prompt.messages is not None:
            system = [] if prefix is None else [{"role": "system", "content": PREFIXES[prefix]}]
            return tokenizer.apply_chat_template([*system, *prompt.messages])
        before = [] if prefix is None else tokenizer.encode(PREFIXES[prefix])
        if prompt.token_ids is not None:
            return [*before, *prompt.token_ids]
        assert prompt.raw is not None
        text = tokenizer.encode_batch([prompt.raw], add_special_tokens=prefix is None)
        return [*before, *text[0]]

    def _reply(self, asked: Asked, outputs: Sequence[RequestOutput]) -> Reply:
        tokenizer = self._llm.tokenizer
        assert tokenizer is not None
        spelling = ResponseFormat(
            kind=asked.kind,
            model=self._llm.name,
            logprobs=asked.params.logprobs,
            return_token_ids=asked.return_token_ids,
            token_bytes=tokenizer.token_bytes,
            first_token_bytes=tokenizer.first_token_bytes,
            special_ids=tokenizer.special_ids,
            skips_special=asked.params.skip_special_tokens,
        )
        bodies = [json.loads(json.dumps(answer_body("", one, spelling))) for one in outputs]
        choices = [choice for body in bodies for choice in body["choices"]]
        for index, choice in enumerate(choices):
            choice["index"] = index
        prompts = sum(len(output.prompt_token_ids) for output in outputs)
        answers = sum(output.metrics.num_output_tokens for output in outputs)
        return Reply(status=200, choices=choices_of(choices), usage=(prompts, answers))


def _failed(output: CompletionOutput) -> bool:
    return output.finish_reason == "error"


def _refusal(output: CompletionOutput) -> Reply:
    return Reply(status=400, error=str(output.stop_reason))


# ----------------------------------------------------------------------------- what is clear


def clear_cases(answered: Sequence[Case], model: Path, folder: Path, **options: Any) -> list[Case]:
    """Those that slightly changed models answer with the same tokens, attending another way.

    With the others, which answer is right is for rounding to say, and that changes with the
    requests beside it. Weights are changed twice, the second time the other way round: where two
    tokens are nearly even, one of the two answers with the other one.
    """
    clear = list(answered)
    for sign in (1, -1):
        changed = shaken_model(model, folder / f"{sign}", sign * SHAKEN)
        with Alone(**options | {"model": changed, "share": "storage"}) as other:
            again = other.answered(clear)
        clear = [case for case, other in zip(clear, again, strict=True) if _is_same(case, other)]
    return clear


def _is_same(case: Case, shaken: Case) -> bool:
    answers = [[one.exact for one in reply.choices] for reply in (case.expected, shaken.expected)]
    return answers[0] == answers[1] and case.expected.status == shaken.expected.status


def shaken_model(model: Path, folder: Path, change: float) -> Path:
    """A copy of a model whose weights differ by random parts of `change`, relatively."""
    import torch
    from safetensors.torch import load_file, save_file

    folder.mkdir(parents=True)
    for file in model.iterdir():
        if file.suffix == ".safetensors":
            generator = torch.Generator().manual_seed(0)
            tensors = {
                name: _shaken(one, change, generator) for name, one in load_file(file).items()
            }
            save_file(tensors, folder / file.name)
        else:
            (folder / file.name).symlink_to(file.resolve())
    return folder


def _shaken(tensor: Tensor, change: float, generator: Generator) -> Tensor:
    noise = tensor.float().clone().normal_(generator=generator)
    return (tensor.float() * (1 + change * noise)).contiguous()
