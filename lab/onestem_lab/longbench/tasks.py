"""LongBench's English tasks: what is asked, how long an answer may be, how it is scored.

The wording of the instructions is ours. Tasks in Chinese (scored by segmented words) and those
that complete code are not here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from onestem_lab.longbench.metrics import (
    count_share,
    label_score,
    paragraph_share,
    rouge_l,
    word_f1,
)

__all__ = ["TASKS", "Task", "score"]


@dataclass(frozen=True)
class Task:
    """One data set.

    Attributes:
        metric: its name, as a reader knows it.
        max_tokens: of an answer, as in the benchmark's own settings.
        before: what stands before the context.
        after: what stands behind it; `{input}` is the example's own.
        few_shot: the context holds examples to continue: no chat template, one line of answer.
    """

    metric: str
    max_tokens: int
    before: str
    after: str = "Question: {input}\nAnswer:"
    few_shot: bool = False


_PASSAGES = (
    "Answer the question below with the help of these passages. Write the answer alone, without "
    "any explanation.\n\n"
)
_SUMMARY = "Summary:"

TASKS: dict[str, Task] = {
    "narrativeqa": Task(
        "F1",
        128,
        "Read this story or script, then answer the question about it in as few words as you can. "
        "Do not explain.\n\n",
    ),
    "qasper": Task(
        "F1",
        128,
        "Read this scientific article, then answer the question about it with a phrase or one "
        "sentence, or with yes or no where that is asked. If the article does not tell, write "
        "unanswerable. Do not explain.\n\n",
    ),
    "multifieldqa_en": Task(
        "F1", 64, "Read this text, then answer the question about it briefly.\n\n"
    ),
    "hotpotqa": Task("F1", 32, _PASSAGES),
    "2wikimqa": Task("F1", 32, _PASSAGES),
    "musique": Task("F1", 32, _PASSAGES),
    "gov_report": Task(
        "ROUGE-L", 512, "Write a summary, one page long, of this government report.\n\n", _SUMMARY
    ),
    "qmsum": Task(
        "ROUGE-L",
        512,
        "Read the record of this meeting, then do what is asked about it in one or more "
        "sentences.\n\n",
        "Asked: {input}\nAnswer:",
    ),
    "multi_news": Task(
        "ROUGE-L", 512, "Write a summary, one page long, of these news articles.\n\n", _SUMMARY
    ),
    "trec": Task(
        "accuracy", 64, "Name the type of each question, as in these examples.\n\n", "{input}", True
    ),
    "triviaqa": Task(
        "F1",
        32,
        "Answer each question from the passage before it, as in these examples, with the answer "
        "alone.\n\n",
        "{input}",
        True,
    ),
    "samsum": Task(
        "ROUGE-L",
        128,
        "Sum up each conversation in a few short sentences, as in these examples.\n\n",
        "{input}",
        True,
    ),
    "passage_retrieval_en": Task(
        "accuracy",
        32,
        "Below are numbered paragraphs of an encyclopedia, and then a summary of one of them.\n\n",
        "Summary: {input}\n\nWhich paragraph does it sum up? Write its name alone, such as "
        "Paragraph 3.\nAnswer:",
    ),
    "passage_count": Task(
        "accuracy",
        32,
        "Some of the paragraphs below stand there more than once.\n\n",
        "How many different paragraphs are there? Write the number alone.\nAnswer:",
    ),
}

_METRICS: dict[str, Callable[[str, str], float]] = {
    "F1": word_f1,
    "ROUGE-L": rouge_l,
    "passage_retrieval_en": paragraph_share,
    "passage_count": count_share,
}


def score(name: str, prediction: str, answers: Sequence[str], labels: Sequence[str]) -> float:
    """The best over the right answers of task `name`, 0 to 1; `labels`: all classes, if any."""
    task = TASKS[name]
    if task.few_shot:
        prediction = prediction.lstrip("\n").split("\n")[0]
    if name == "trec":
        return max(label_score(prediction, answer, labels) for answer in answers)
    metric = _METRICS.get(name) or _METRICS[task.metric]
    return max(metric(prediction, answer) for answer in answers)
