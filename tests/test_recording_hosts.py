"""Several hosts open one recording: the first begins it, the others join what they can see."""

from __future__ import annotations

import pytest
from recording_rows import make_manifest, make_rows, make_segments, record, tree

from kernjax.base.errors import UserError
from kernjax.recording import RecordingWriter, load_recording, writer

SEGMENTS = make_segments(4)


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    monkeypatch.setattr(writer, "_TICKET_S", 0.3)


def begin(path, **kwargs) -> tuple[RecordingWriter, dict]:
    first = RecordingWriter.open_or_create(path, make_manifest(), SEGMENTS, **kwargs)
    return first, first.issue_ticket()


def test_two_hosts_write_what_one_would(tmp_path):
    record(tmp_path / "one", count=4)
    first, ticket = begin(tmp_path / "two")
    second = RecordingWriter.join(tmp_path / "two", make_manifest(), SEGMENTS, ticket)
    first.void_ticket()
    for index, each in zip(first.missing(), (first, second) * 2, strict=True):
        each.write(index, make_rows(SEGMENTS[index]))
    assert first.missing() == second.missing() == []
    first.finish()
    assert tree(tmp_path / "two") == tree(tmp_path / "one")


def test_another_place_of_the_same_name_is_refused(tmp_path):
    """Even one that holds the same producer's recording, begun on that host before."""
    _, ticket = begin(tmp_path / "here")
    begin(tmp_path / "there")
    for place in ("there", "nowhere"):
        with pytest.raises(UserError, match="is not shared by the hosts"):
            RecordingWriter.join(tmp_path / place, make_manifest(), SEGMENTS, ticket)
    assert not (tmp_path / "nowhere").exists()


def test_a_host_with_other_inputs_is_refused(tmp_path):
    _, ticket = begin(tmp_path / "r")
    with pytest.raises(UserError, match="batch_size"):
        RecordingWriter.join(tmp_path / "r", make_manifest(batch_size=99), SEGMENTS, ticket)


def test_all_of_them_overwrite_together(tmp_path):
    record(tmp_path / "r", count=4)
    record(tmp_path / "new", count=4, seed=1)
    old = load_recording(tmp_path / "r").identity
    first, ticket = begin(tmp_path / "r", overwrite=True)
    second = RecordingWriter.join(tmp_path / "r", make_manifest(), SEGMENTS, ticket)
    for index in range(4):
        second.write(index, make_rows(SEGMENTS[index], seed=1))
    assert load_recording(tmp_path / "r").identity == old
    first.void_ticket()
    first.finish()
    assert second.missing() == []
    assert tree(tmp_path / "r") == tree(tmp_path / "new")


def test_a_ticket_that_a_kill_left_is_in_nobodys_way(tmp_path):
    record(tmp_path / "one", count=4)
    begin(tmp_path / "r")
    first, ticket = begin(tmp_path / "r")
    RecordingWriter.join(tmp_path / "r", make_manifest(), SEGMENTS, ticket)
    first.void_ticket()
    for index in range(4):
        first.write(index, make_rows(SEGMENTS[index]))
    first.finish()
    assert tree(tmp_path / "r") == tree(tmp_path / "one")
