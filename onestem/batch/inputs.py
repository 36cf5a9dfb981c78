"""What a job reads: OpenAI batch lines, or rows of JSON lines, CSV, Parquet or a data set.

Every input is read as a stream of batch lines: `templates` makes one of each row. A file's suffix
gives its form: .csv, .tsv, .parquet; any other is JSON lines. A folder is a data set that
`datasets.save_to_disk` wrote, or one of data files (`NAME.parquet`, `NAME-00000-of-00002.csv` and
so on). These are read one after the other, in the order of their names.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onestem.batch.format import BatchLine, LineError
from onestem.batch.lines import MAX_LINE_BYTES, See, Seen, lines_of, open_file, too_long, unseen
from onestem.batch.tables import data_errors, json_row, rows_of
from onestem.batch.templates import Recipe, expected_columns
from onestem.options import InputOptions

Numbered = tuple[int, BatchLine | LineError]  # (number of the line or row from 1, batch line)


@dataclass(frozen=True)
class InputSurvey:
    """Facts from one pass over the input: its hash, bytes, and lines that are not blank."""

    sha256: str
    num_bytes: int
    num_lines: int


class JobInput:
    """An existing input.

    Args:
        path: a file, or the folder of a data set.
        options: how its rows become requests.

    Attributes:
        unit: word for one of its items: line or row.
        identity: the options that a job's answers depend on.
        parse_special: of requests that do not say it; None: what a row's values fill in a template
            is quoted, and nothing else.

    Raises:
        JobError: the input cannot be read.
        ConfigError: the options do not fit it.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        options: InputOptions = InputOptions(),  # noqa: B008
    ) -> None:
        self.path = Path(path)
        self.recipe = Recipe.of(options)
        self._rows = rows_of(self.path, options)
        self.unit = "line" if self._rows is None else "row"
        if self._rows is not None:
            with data_errors(self.path):
                expected_columns(str(self.path), self.recipe, self._rows.columns)
        self.parse_special = options.parse_special
        self.identity = options.model_dump(exclude_none=True)

    @property
    def num_bytes(self) -> int:
        """Bytes of all its files."""
        paths = [self.path] if self._rows is None else self._rows.paths
        return sum(path.stat().st_size for path in paths)

    def survey(self) -> InputSurvey:
        """Hash the input and count its lines."""
        seen = Seen()
        if self._rows is None:
            with open_file(self.path) as file:
                count = sum(1 for _ in lines_of(file, seen))
        else:
            with data_errors(self.path):
                count = self._rows.count(seen)
        return InputSurvey(seen.digest.hexdigest(), seen.num_bytes, count)

    def read(self, see: See) -> Iterator[Numbered]:
        """(number, batch line) of each line; an error for one that is too long or cannot be made.

        `see` gets every byte of the input, in the order of `survey`.
        """
        return ((number, self._line(number, item)) for number, item in self._items(see))

    def rows(self) -> Iterator[tuple[int, Mapping[str, Any]]]:
        """(number, row) of each readable row, for an input with a template."""
        return ((number, row) for number, row in self._items(unseen) if isinstance(row, Mapping))

    def _items(self, see: See) -> Iterator[tuple[int, bytes | Mapping[str, Any] | LineError]]:
        """(number, item) of each line, or of each row where there is a template."""
        if self._rows is not None:
            assert self.recipe is not None  # else the table would have been refused
            with data_errors(self.path):
                yield from enumerate(self._rows.read(self.recipe.columns, see), start=1)
            return
        with open_file(self.path) as file:
            for number, raw in lines_of(file, see):
                yield number, raw if self.recipe is None else json_row(raw)

    def _line(
        self, number: int, item: bytes | Mapping[str, Any] | LineError
    ) -> BatchLine | LineError:
        if isinstance(item, LineError):
            return item
        if isinstance(item, bytes):
            return BatchLine(item)
        assert self.recipe is not None
        try:
            line = self.recipe.line(number, item)
        except LineError as error:
            return error
        return too_long("row") if len(line.raw) > MAX_LINE_BYTES else line
