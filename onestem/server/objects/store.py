"""What outlives the server: files, batches, prefixes and schemas, in SQLite and a folder.

Each call is one transaction. Calls block for milliseconds (a commit reaches the disk), so the
server makes them from threads; a lock lets one at a time in.
"""

from __future__ import annotations

import fcntl
import json
import os
import sqlite3
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from onestem.errors import ConfigError

SCHEMA = """
CREATE TABLE IF NOT EXISTS files (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, filename TEXT NOT NULL, purpose TEXT NOT NULL,
    bytes INTEGER NOT NULL, created_at INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS batches (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE NOT NULL, owner TEXT NOT NULL,
    status TEXT NOT NULL, record TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS prefixes (
    owner TEXT NOT NULL, name TEXT NOT NULL, version INTEGER NOT NULL, source TEXT NOT NULL,
    created_at INTEGER NOT NULL, PRIMARY KEY (owner, name));
CREATE TABLE IF NOT EXISTS schemas (
    owner TEXT NOT NULL, name TEXT NOT NULL, version INTEGER NOT NULL, source TEXT NOT NULL,
    created_at INTEGER NOT NULL, PRIMARY KEY (owner, name));
"""
VERSION = 1
OPEN_STATUSES = ("validating", "in_progress", "finalizing", "cancelling")

Row = dict[str, Any]
Named = Literal["prefixes", "schemas"]  # tables of what has names


def now() -> int:
    """Unix seconds, as rows have them."""
    return int(time.time())


class Store:
    """The state of one server; a second one on the same folder is refused.

    Args:
        folder: made if it does not exist.

    Attributes:
        files: folder of uploaded and written files, each named by its id.
        work: folder where batches are worked on.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files = folder / "files"
        self.work = folder / "work"
        try:
            for path in (self.files, self.work):
                path.mkdir(parents=True, exist_ok=True)
            self._lock_file = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(f"state folder {folder}: {error.strerror}: choose another") from error
        self._take_lock()
        self._lock = threading.Lock()
        self._db = self._open()

    def _take_lock(self) -> None:
        try:
            fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock_file)
            raise ConfigError(
                f"another server keeps its state in {self.folder}: choose another with --state"
            ) from error

    def _open(self) -> sqlite3.Connection:
        path = self.folder / "server.db"
        try:
            db = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
            db.row_factory = sqlite3.Row
            db.execute("PRAGMA journal_mode=WAL")
            db.execute("PRAGMA synchronous=FULL")
            known = db.execute("PRAGMA user_version").fetchone()[0]
            if known not in (0, VERSION):
                raise ConfigError(f"{path} is of version {known}, expected {VERSION}")
            db.executescript(SCHEMA)
            db.execute(f"PRAGMA user_version={VERSION}")
        except sqlite3.DatabaseError as error:
            raise ConfigError(f"{path} cannot be used: {error}: choose another --state") from error
        return db

    def close(self) -> None:
        """Let go of the folder; nothing may be called afterwards."""
        with self._lock:
            self._db.close()
            os.close(self._lock_file)

    def _rows(self, statement: str, *values: object) -> list[Row]:
        with self._lock:
            return [dict(row) for row in self._db.execute(statement, values).fetchall()]

    def add_file(self, row: Mapping[str, Any]) -> None:
        """Enter a file; where its id is known, only its size."""
        self._rows(
            "INSERT INTO files (id, owner, filename, purpose, bytes, created_at) "
            "VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT (id) DO UPDATE SET bytes = excluded.bytes",
            *(row[name] for name in ("id", "owner", "filename", "purpose", "bytes", "created_at")),
        )

    def file(self, owner: str, file_id: str) -> Row | None:
        """A key's file; None if it has none of that id."""
        rows = self._rows("SELECT * FROM files WHERE id = ? AND owner = ?", file_id, owner)
        return rows[0] if rows else None

    def list_files(self, owner: str) -> list[Row]:
        """A key's files, newest first."""
        return self._rows(
            "SELECT * FROM files WHERE owner = ? ORDER BY created_at DESC, rowid DESC", owner
        )

    def file_bytes(self, owner: str) -> int:
        """Bytes of all files of a key."""
        (row,) = self._rows("SELECT TOTAL(bytes) AS used FROM files WHERE owner = ?", owner)
        return int(row["used"])

    def delete_file(self, owner: str, file_id: str) -> None:
        """Forget a key's file, and unlink it."""
        self._rows("DELETE FROM files WHERE id = ? AND owner = ?", file_id, owner)
        (self.files / file_id).unlink(missing_ok=True)

    def save_batch(self, batch_id: str, owner: str, record: Mapping[str, Any]) -> None:
        """Enter a batch, or its new record."""
        self._rows(
            "INSERT INTO batches (id, owner, status, record) VALUES (?, ?, ?, ?) "
            "ON CONFLICT (id) DO UPDATE SET status = excluded.status, record = excluded.record",
            *(batch_id, owner, record["status"], json.dumps(dict(record))),
        )

    def batch(self, owner: str, batch_id: str) -> Row | None:
        """A key's batch; None if it has none of that id."""
        rows = self._rows("SELECT * FROM batches WHERE id = ? AND owner = ?", batch_id, owner)
        return _batch(rows[0]) if rows else None

    def list_batches(self, owner: str) -> list[Row]:
        """A key's batches, newest first."""
        rows = self._rows("SELECT * FROM batches WHERE owner = ? ORDER BY number DESC", owner)
        return [_batch(row) for row in rows]

    def open_batches(self) -> list[tuple[str, Row]]:
        """(owner, batch) of those that have not ended, oldest first."""
        marks = ", ".join("?" * len(OPEN_STATUSES))
        rows = self._rows(
            f"SELECT * FROM batches WHERE status IN ({marks}) ORDER BY number", *OPEN_STATUSES
        )
        return [(row["owner"], _batch(row)) for row in rows]

    def recent_batches(self, count: int) -> list[tuple[str, Row]]:
        """(owner, batch) of the newest, of all keys."""
        rows = self._rows("SELECT * FROM batches ORDER BY number DESC LIMIT ?", count)
        return [(row["owner"], _batch(row)) for row in rows]

    def save_named(self, table: Named, row: Mapping[str, Any]) -> None:
        """A prefix or a schema, in place of an earlier version."""
        self._rows(
            f"INSERT OR REPLACE INTO {table} (owner, name, version, source, created_at) "
            "VALUES (?, ?, ?, ?, ?)",
            *(row["owner"], row["name"], row["version"]),
            *(json.dumps(row["source"]), row["created_at"]),
        )

    def list_named(self, table: Named) -> list[Row]:
        """All prefixes or all schemas (`table`), by owner and name."""
        rows = self._rows(f"SELECT * FROM {table} ORDER BY owner, name")
        return [{**row, "source": json.loads(row["source"])} for row in rows]

    def delete_named(self, table: Named, owner: str, name: str) -> None:
        """Forget a prefix or a schema; an unknown one is ignored."""
        self._rows(f"DELETE FROM {table} WHERE owner = ? AND name = ?", owner, name)


def _batch(row: Row) -> Row:
    record: Row = json.loads(row["record"])
    return record
