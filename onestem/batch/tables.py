"""Tables in files and folders: CSV, Parquet, JSON lines, and data sets."""

from __future__ import annotations

import contextlib
import csv
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import IO, Any

from onestem.batch.format import LineError
from onestem.batch.lines import MAX_LINE_BYTES, See, lines_of, open_file, unseen
from onestem.checked import show
from onestem.errors import ConfigError, JobError, RequestError
from onestem.openai.read import read_object
from onestem.options import InputOptions

ROWS_AT_A_TIME = 256
PIECE_BYTES = 1 << 20

DELIMITERS = {".csv": ",", ".tsv": "\t"}
DATA_FILES = (*DELIMITERS, ".parquet", ".jsonl")
SPLITS = ("train", "training", "validation", "valid", "val", "dev", "test", "testing", "eval")
EXTRA = "pip install 'onestem[data]'"


def rows_of(path: Path, options: InputOptions) -> Files | Saved | None:
    """The table that an input is; None: JSON lines."""
    rows: Files | Saved | None = None
    if path.is_dir():
        rows = _folder(path, options)
    else:
        open_file(path).close()
        if options.split is not None:
            raise ConfigError(f"--split is for data sets, and {path} is one file: leave it out")
        if path.suffix in (*DELIMITERS, ".parquet"):
            rows = Files([path], options.delimiter)
    if options.delimiter is not None and not (isinstance(rows, Files) and rows.is_csv):
        raise ConfigError(f"--delimiter is for CSV, and {path} is none: leave it out")
    return rows


def _folder(path: Path, options: InputOptions) -> Files | Saved:
    if (path / "dataset_dict.json").is_file():
        splits = sorted(one.parent.name for one in path.glob("*/state.json"))
        return Saved(path / _split(path, options.split, splits))
    if (path / "state.json").is_file():
        if options.split is not None:
            raise ConfigError(f"{path} has no splits: leave --split out")
        return Saved(path)
    files = [
        one
        for one in sorted(path.rglob("*"))
        if one.suffix in DATA_FILES
        and one.is_file()
        and not any(part.startswith(".") for part in one.relative_to(path).parts)
    ]
    if not files:
        raise JobError(
            f"{path} is no data set: expected what save_to_disk writes, or files of "
            f"{', '.join(DATA_FILES)}"
        )
    kinds = sorted({one.suffix for one in files})
    if len(kinds) > 1:
        raise JobError(f"{path} has files of {' and '.join(kinds)}: name one of them")
    words = {one: set(re.split(r"[^a-z]+", str(one.relative_to(path)).lower())) for one in files}
    splits = [split for split in SPLITS if any(split in words[one] for one in files)]
    if options.split is not None or len(splits) > 1:
        split = _split(path, options.split, splits)
        files = [one for one in files if split in words[one]]
    return Files(files, options.delimiter)


def _split(path: Path, asked: str | None, there: Sequence[str]) -> str:
    if asked is not None and asked in there:
        return asked
    if asked is None and len(there) == 1:
        return there[0]
    if not there:
        raise ConfigError(f"{path} has no splits: leave --split out")
    what = "several splits" if asked is None else f"no split {asked}"
    raise ConfigError(f"{path} has {what}: give --split {' or '.join(there)}")


@contextlib.contextmanager
def data_errors(path: Path) -> Iterator[None]:
    """Turn a library's error about a damaged file into one line."""
    try:
        yield
    except (OSError, ValueError) as error:
        if isinstance(error, (ConfigError, RequestError)):
            raise
        reason = " ".join((str(error) or type(error).__name__).split())
        raise JobError(f"cannot read {path}: {reason[:300]}") from error


class Files:
    """Files of one form, one after the other.

    Attributes:
        paths: of the files.
    """

    def __init__(self, paths: Sequence[Path], delimiter: str | None) -> None:
        self.paths = paths
        suffix = paths[0].suffix
        self.is_csv = suffix in DELIMITERS
        self._delimiter = delimiter or DELIMITERS.get(suffix, ",")
        self._suffix = suffix

    @cached_property
    def columns(self) -> Sequence[str]:
        """Columns of the first file."""
        first = self.paths[0]
        if self.is_csv:
            with open_file(first) as file:
                return _Csv(first, file, self._delimiter, unseen).header
        if self._suffix == ".parquet":
            names: list[str] = _parquet(first).schema_arrow.names
            return names
        return list(next((row for row in _json_rows(first, unseen) if isinstance(row, dict)), {}))

    def count(self, see: See) -> int:
        """Number of rows; `see` gets all bytes of the files."""
        count = 0
        for path in self.paths:
            if self._suffix == ".parquet":
                count += _parquet(path).metadata.num_rows
                _Shares([path], see).end()
            else:
                count += sum(1 for _ in self._read(path, (), see))
        return count

    def read(self, wanted: Sequence[str], see: See) -> Iterator[Mapping[str, Any] | LineError]:
        """The rows, with at least the wanted columns; `see` gets all bytes of the files."""
        for path in self.paths:
            yield from self._read(path, wanted, see)

    def _read(
        self, path: Path, wanted: Sequence[str], see: See
    ) -> Iterator[Mapping[str, Any] | LineError]:
        if self.is_csv:
            with open_file(path) as file:
                yield from _Csv(path, file, self._delimiter, see).rows()
        elif self._suffix == ".parquet":
            yield from _parquet_rows(path, wanted, see)
        else:
            yield from _json_rows(path, see)


def _json_rows(path: Path, see: See) -> Iterator[Mapping[str, Any] | LineError]:
    with open_file(path) as file:
        for number, raw in lines_of(file, see):
            yield json_row(raw, f"{path.name}, line {number}: ")


def json_row(raw: bytes | LineError, where: str = "") -> Mapping[str, Any] | LineError:
    """The row in a line of JSON; an error says `where` first."""
    if isinstance(raw, LineError):
        return raw
    try:
        return read_object(raw, "the line")
    except RequestError as error:
        return LineError("invalid_json_line", f"{where}{error}")


class _Csv:
    """A CSV file with a header. Cells that are not UTF-8 are refused when a template uses them."""

    def __init__(self, path: Path, file: IO[bytes], delimiter: str, see: See) -> None:
        self._path = path
        csv.field_size_limit(MAX_LINE_BYTES)
        lines = map(partial(_decoded, see), file)
        self._reader = csv.reader(lines, delimiter=delimiter, strict=True)
        header = self._next()
        if header:
            header[0] = header[0].removeprefix("\ufeff")
        if not header or not all(header):
            raise JobError(f"{path} has no header, or one with a column without a name: add one")
        twice = next((name for name in header if header.count(name) > 1), None)
        if twice is not None:
            raise JobError(f"{path} has two columns {show(twice)}: rename one of them")
        if any("\udc80" <= sign <= "\udcff" for name in header for sign in name):
            raise JobError(f"the header of {path} is not UTF-8: save the file as UTF-8")
        self.header = header

    def _next(self) -> list[str]:
        """The next row that is not blank; an empty list at the end."""
        try:
            return next((cells for cells in self._reader if cells), [])
        except csv.Error as error:
            raise JobError(
                f"{self._path}, line {self._reader.line_num}: {error}: correct its quotes, or "
                "give --delimiter"
            ) from error

    def rows(self) -> Iterator[Mapping[str, str] | LineError]:
        while cells := self._next():
            if len(cells) == len(self.header):
                yield dict(zip(self.header, cells, strict=True))
                continue
            yield LineError(
                "invalid_row",
                f"it has {len(cells)} cells, the header has {len(self.header)}: correct it",
            )


def _decoded(see: See, raw: bytes) -> str:
    see(raw)
    return raw.decode("utf-8", "surrogateescape")


def _parquet(path: Path) -> Any:
    try:
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise JobError(f"{path} needs pyarrow: {EXTRA}") from error
    open_file(path).close()
    with data_errors(path):
        return parquet.ParquetFile(path)


def _parquet_rows(path: Path, wanted: Sequence[str], see: See) -> Iterator[Mapping[str, Any]]:
    table, shares, done = _parquet(path), _Shares([path], see), 0
    there = [name for name in wanted if name in table.schema_arrow.names]
    for batch in table.iter_batches(ROWS_AT_A_TIME, columns=there):
        done += batch.num_rows
        shares.until(done / table.metadata.num_rows)
        yield from batch.to_pylist()
    shares.end()


class Saved:
    """A data set that `datasets.Dataset.save_to_disk` wrote; members as of `Files`."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @cached_property
    def _table(self) -> Any:
        try:
            import datasets
        except ImportError as error:
            raise JobError(f"{self._path} needs datasets: {EXTRA}") from error
        with data_errors(self._path):
            return datasets.load_from_disk(str(self._path)).with_format("arrow")

    @property
    def columns(self) -> Sequence[str]:
        names: list[str] = self._table.column_names
        return names

    def count(self, see: See) -> int:
        _Shares(self.paths, see).end()
        return len(self._table)

    def read(self, wanted: Sequence[str], see: See) -> Iterator[Mapping[str, Any]]:
        shares, done = _Shares(self.paths, see), 0
        rows = self._table.select_columns(list(wanted))
        for batch in rows.iter(ROWS_AT_A_TIME):
            done += batch.num_rows
            shares.until(done / len(rows))
            yield from batch.to_pylist()
        shares.end()

    @property
    def paths(self) -> list[Path]:
        return sorted(one for one in self._path.iterdir() if one.suffix in (".arrow", ".json"))


class _Shares:
    """Reports the bytes of files in step with their rows, whose reading has another order."""

    def __init__(self, paths: Sequence[Path], see: See) -> None:
        self._paths, self._see = paths, see
        self._total = sum(path.stat().st_size for path in paths)
        self._pieces = self._read()
        self._told = 0

    def until(self, share: float) -> None:
        """Report at least this share of the bytes."""
        while self._told < share * self._total:
            piece = next(self._pieces, None)
            if piece is None:
                return
            self._told += len(piece)
            self._see(piece)

    def end(self) -> None:
        for piece in self._pieces:
            self._see(piece)

    def _read(self) -> Iterator[bytes]:
        for path in self._paths:
            with open_file(path) as file:
                while piece := file.read(PIECE_BYTES):
                    yield piece
