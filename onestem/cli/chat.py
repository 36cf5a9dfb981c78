"""`onestem chat`: a conversation at a terminal."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from onestem.cli import options
from onestem.options import EngineOptions

if TYPE_CHECKING:
    from onestem.llm import LLM
    from onestem.openai.forms import AnswerReader
    from onestem.request import Answer, SamplingParams

HELP = """/system TEXT  begin again with this system prompt; without TEXT show it
/reset        begin again, with the same system prompt
/stats        what the last answer cost, and what was shared
/bye          leave (Ctrl-D too); Ctrl-C ends an answer
A line that ends in \\ goes on in the next."""
LEAVE = ("/bye", "/exit", "/quit")


@options.with_options
def chat(
    context: typer.Context,
    engine: EngineOptions,
    name: options.Model = None,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Maximum tokens of an answer.")] = 2048,
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
) -> None:
    """Talk to a model. Each turn computes only what is new: the conversation before it is in KV
    memory. /help lists commands. Without a terminal each line is a message; a refused one makes the
    exit code 1."""
    from onestem.errors import ConfigError
    from onestem.request import SamplingParams

    params = SamplingParams(
        max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=engine.seed
    )
    llm = options.load_llm(options.named_model(context, engine, name))
    if not options.has_template(llm):
        raise ConfigError(
            f"{llm.name} has no chat template: `onestem generate` goes on with a text"
        )
    is_terminal = sys.stdin is not None and sys.stdin.isatty()
    if is_terminal:
        import readline  # noqa: F401  (editing and history in `input`)

        print(f"{llm.name}: /help lists commands, Ctrl-D leaves", file=sys.stderr)
    # The first Ctrl-C ends an answer, not the command.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    refused = talk(Conversation(llm, params, system), _lines(is_terminal))
    if refused and not is_terminal:
        raise typer.Exit(1)


def talk(conversation: Conversation, lines: Iterator[str]) -> int:
    """Answer the lines; one that begins with / is a command. Returns how many were refused."""
    from onestem.errors import RequestError

    refused = 0
    for line in lines:
        word, _, rest = line.partition(" ")
        if word in (*LEAVE, "/reset", "/stats", "/help") and rest.strip():
            print(f"{word} takes no text, and nothing was done: give it alone", file=sys.stderr)
            refused += 1
        elif word in LEAVE:
            break
        elif word == "/system" and rest.strip():
            conversation.begin(rest.strip())
        elif word == "/system":
            print(conversation.system or "there is no system prompt", file=sys.stderr)
        elif word == "/reset":
            conversation.begin(conversation.system)
        elif word == "/stats":
            print(conversation.stats(), file=sys.stderr)
        elif word == "/help":
            print(HELP, file=sys.stderr)
        elif word.startswith("/") and word[1:].isalpha():
            print(f"there is no command {word}: /help lists them", file=sys.stderr)
            refused += 1
        elif line.strip():
            try:
                conversation.answer(line, lambda piece: print(piece, end="", flush=True))
            except RequestError as error:
                print(f"{error} (/reset begins again)", file=sys.stderr)
                refused += 1
                continue
            print()
    return refused


class Conversation:
    """Messages, and the answer to the last of them."""

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None) -> None:
        self.system: str | None = None
        self._llm, self._params = llm, params
        self._last: Answer | None = None
        self._seconds = 0.0
        self.begin(system)

    def begin(self, system: str | None) -> None:
        """Forget what was said."""
        self.system = system
        self.messages = [{"role": "system", "content": system}] if system is not None else []

    def answer(self, text: str, write: Callable[[str], None]) -> None:
        """Write the answer to a message, piece by piece. Both are part of the conversation
        afterwards, the answer as far as it came if Ctrl-C ended it.

        Raises:
            RequestError: the message is not answered, and is not part of the conversation.
        """
        from onestem.openai.forms import ReadAnswer

        asked = [*self.messages, {"role": "user", "content": text}]
        said, began = ReadAnswer(), time.monotonic()
        reader: AnswerReader | None = None
        stream = self._llm.stream_chat(asked, self._params, output_kind="delta")
        try:
            for self._last in stream:
                reader = reader or self._reader(self._last)
                events = reader.feed(self._last.outputs[0].text)
                for event in (*events, *(reader.finish() if self._last.finished else ())):
                    gap = "\n\n" if event.text and said.reasoning and not said.text else ""
                    said.add(event)
                    write(gap + event.reasoning + event.text)
        except KeyboardInterrupt:
            write(" [ended]")
        finally:
            stream.close()
        self._seconds = time.monotonic() - began
        message = {"role": "assistant", "content": said.text}
        thought = {"reasoning_content": said.reasoning} if said.reasoning else {}
        self.messages = [*asked, message | thought]

    def _reader(self, answer: Answer) -> AnswerReader:
        """Tells an answer's reasoning from its text."""
        from onestem.openai.forms import GENERIC, AnswerReader, Reading

        assert self._llm.tokenizer is not None
        found = self._llm.tokenizer.reading(answer.prompt_token_ids, None)
        return AnswerReader(found or Reading(form=GENERIC, calls=False))

    def stats(self) -> str:
        """What the last answer cost."""
        if self._last is None:
            return "nothing was answered yet"
        cost = self._last.metrics
        assert cost.first_token_time is not None  # a piece came
        first = cost.first_token_time - cost.arrival_time
        rate = (cost.num_output_tokens - 1) / max(self._seconds - first, 1e-9)
        return (
            f"prompt {cost.num_prompt_tokens} tokens: {cost.num_cached_tokens} shared with what "
            f"was computed before, {cost.num_computed_tokens} computed; first token after "
            f"{first:.2f} s; answer {cost.num_output_tokens} tokens, {rate:.1f} a second; KV "
            f"memory holds {self._llm.kv_tokens} tokens"
        )


def _lines(is_terminal: bool) -> Iterator[str]:
    """What is typed, or lines of the standard input."""
    if not is_terminal:
        yield from (line.rstrip("\n") for line in sys.stdin or ())
        return
    while True:
        try:
            line = input(">>> ")
            while line.endswith("\\"):
                line = line[:-1] + "\n" + input("... ")
        except KeyboardInterrupt:
            print(file=sys.stderr)
            continue
        except EOFError:
            print(file=sys.stderr)
            return
        yield line
