"""The state folder: one server at a time, nothing lost."""

from __future__ import annotations

import sqlite3
from contextlib import closing

import pytest

from onestem.errors import ConfigError
from onestem.server.objects.store import Store

FILE = {
    "id": "file-1", "owner": "a", "filename": "x", "purpose": "batch", "bytes": 3, "created_at": 1,
}  # fmt: skip


def test_one_server_per_folder(tmp_path):
    first = Store(tmp_path / "state")
    with pytest.raises(ConfigError, match="another server keeps its state"):
        Store(tmp_path / "state")
    first.close()
    Store(tmp_path / "state").close()


def test_what_is_stored_is_there_again_and_its_owners_alone(tmp_path):
    with closing(Store(tmp_path)) as store:
        store.add_file(FILE)
        for number, status in enumerate(("validating", "completed", "in_progress")):
            store.save_batch(f"b{number}", "a", {"id": f"b{number}", "status": status})
        row = {"owner": "a", "name": "p", "version": 2, "source": {"text": "é"}, "created_at": 1}
        store.save_named("prefixes", row)
    with closing(Store(tmp_path)) as store:
        assert store.file("a", "file-1") == FILE
        assert store.file("b", "file-1") is None
        assert [record["id"] for _, record in store.open_batches()] == ["b0", "b2"]
        assert [record["id"] for record in store.list_batches("a")] == ["b2", "b1", "b0"]
        assert store.list_batches("b") == []
        assert store.list_named("prefixes") == [row]
        store.delete_named("prefixes", "b", "p")
        assert store.list_named("prefixes") == [row]
        store.delete_file("a", "file-1")
        assert store.list_files("a") == []


def test_a_folder_that_cannot_be_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="choose another"):
        Store(tmp_path / "file" / "state")
    (tmp_path / "server.db").write_bytes(b"no database" * 100)
    with pytest.raises(ConfigError, match="cannot be used"):
        Store(tmp_path)


def test_a_later_version_is_refused(tmp_path):
    Store(tmp_path).close()
    with closing(sqlite3.connect(tmp_path / "server.db")) as db:
        db.execute("PRAGMA user_version=99")
    with pytest.raises(ConfigError, match="version 99"):
        Store(tmp_path)
