"""LongBench's metrics (arXiv 2308.14508, table 1), each of one prediction and one answer: 0 to 1.

They follow the benchmark's published scoring, so that figures compare; where it depends on the
order of an iteration or on a blank behind a full stop, they do what it evidently means.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

__all__ = ["count_share", "label_score", "paragraph_share", "rouge_l", "word_f1"]

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLE = re.compile(r"\b(a|an|the)\b")


def normalized(text: str) -> list[str]:
    """Words in lower case, without punctuation and articles."""
    return _ARTICLE.sub(" ", text.lower().translate(_PUNCTUATION)).split()


def word_f1(prediction: str, answer: str) -> float:
    """Harmonic mean of precision and recall over normalized words, each counted as often as it
    stands."""
    found, wanted = normalized(prediction), normalized(answer)
    return _f1(sum((Counter(found) & Counter(wanted)).values()), len(found), len(wanted))


def rouge_l(prediction: str, answer: str) -> float:
    """ROUGE-L of whole summaries (Lin 2004, section 3.2), as the package `rouge` computes it.

    Sentences end at full stops. Counted are the distinct words that stand in a longest common
    subsequence of some sentence of the one and some sentence of the other.
    """
    found, wanted = _sentences(prediction), _sentences(answer)
    common: set[str] = set()
    for one in wanted:
        for other in found:
            common |= _common_subsequence(one, other)
    return _f1(len(common), len(_distinct(found)), len(_distinct(wanted)))


def label_score(prediction: str, answer: str, labels: Sequence[str]) -> float:
    """1 / the number of labels that the prediction names, if the right one is among them. A label
    that is a part of the right one is not counted."""
    named = [label for label in labels if label in prediction]
    counted = [label for label in named if label == answer or label not in answer]
    return 1 / len(counted) if answer in counted else 0.0


def paragraph_share(prediction: str, answer: str) -> float:
    """The share of the numbers in the prediction that are the answer's ("Paragraph 7")."""
    wanted = re.search(r"\d+", answer)
    return 0.0 if wanted is None else count_share(prediction, wanted.group())


def count_share(prediction: str, answer: str) -> float:
    """The share of the numbers in the prediction that are the answer."""
    numbers = re.findall(r"\d+", prediction)
    return numbers.count(answer.strip()) / len(numbers) if numbers else 0.0


def _f1(common: int, num_found: int, num_wanted: int) -> float:
    return 2 * common / (num_found + num_wanted) if common else 0.0


def _sentences(text: str) -> list[list[str]]:
    return [words for words in (part.split() for part in text.split(".")) if words]


def _distinct(sentences: list[list[str]]) -> set[str]:
    return {word for sentence in sentences for word in sentence}


def _common_subsequence(one: Sequence[str], other: Sequence[str]) -> set[str]:
    """Words of a longest common subsequence; of several, the one found from the end backwards."""
    lengths = _lengths(one, other)
    words: set[str] = set()
    i, j = len(one), len(other)
    while i and j:
        if one[i - 1] == other[j - 1]:
            words.add(one[i - 1])
            i, j = i - 1, j - 1
        elif lengths[i - 1][j] > lengths[i][j - 1]:
            i -= 1
        else:
            j -= 1
    return words


def _lengths(one: Sequence[str], other: Sequence[str]) -> list[list[int]]:
    """Of the longest common subsequence of the first i words of one and j of the other."""
    lengths = [[0] * (len(other) + 1)]
    for word in one:
        above, line = lengths[-1], [0]
        for j, candidate in enumerate(other):
            same = above[j] + 1 if word == candidate else max(above[j + 1], line[j])
            line.append(same)
        lengths.append(line)
    return lengths
