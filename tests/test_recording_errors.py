"""What a recording refuses, each with a message that says what is wrong and what to do."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
from recording_rows import make_manifest, make_rows, make_segments, record, tree

from kernjax.base.errors import UserError
from kernjax.base.hashing import sha256_bytes
from kernjax.recording import (
    RecordingWriter,
    canonical_json,
    check_comparable,
    load_recording,
)
from kernjax.recording.manifest import recording_identity


def refusal(call, *args, **kwargs) -> str:
    with pytest.raises(UserError) as caught:
        call(*args, **kwargs)
    return str(caught.value)


@pytest.fixture
def complete(tmp_path):
    record(tmp_path / "r")
    return tmp_path / "r"


def edit(path, name, change):
    value = json.loads((path / name).read_text())
    change(value)
    (path / name).write_bytes(canonical_json(value))


# Loading


def test_not_a_recording(tmp_path):
    assert "does not exist" in refusal(load_recording, tmp_path / "absent")
    (tmp_path / "notes.txt").write_text("hello")
    assert "no manifest.json" in refusal(load_recording, tmp_path)
    assert "is a file" in refusal(load_recording, tmp_path / "notes.txt")
    (tmp_path / "manifest.json").write_text('{"name": "something else"}')
    assert "schema_version=None" in refusal(load_recording, tmp_path)
    (tmp_path / "manifest.json").write_text('{"schema_version": 1}')
    assert "lists no segments" in refusal(load_recording, tmp_path)
    (tmp_path / "manifest.json").write_text("[1]")
    assert "not what kernjax writes: not an object" in refusal(load_recording, tmp_path)
    (tmp_path / "manifest.json").write_bytes(b"\xff\x00{")
    assert "manifest.json is not what kernjax writes" in refusal(load_recording, tmp_path)


def test_incomplete_names_the_missing_segments(tmp_path):
    segments = make_segments()
    writer = RecordingWriter.create(tmp_path / "r", make_manifest(), segments)
    writer.write(1, make_rows(segments[1]))
    message = refusal(load_recording, tmp_path / "r")
    assert "3 of 4 segments are missing (prose-0, prose-2, code-3)" in message
    assert "goes on where it stopped" in message
    assert "3 segments are not written (prose-0, prose-2, code-3)" in refusal(writer.finish)
    for index in (0, 2, 3):
        writer.write(index, make_rows(segments[index]))
    assert "it was not finished" in refusal(load_recording, tmp_path / "r")


def test_newer_schema(complete):
    edit(complete, "manifest.json", lambda m: m.update(schema_version=2))
    message = refusal(load_recording, complete)
    assert "schema version 2" in message and "newer kernjax" in message


def test_too_few_ids(complete):
    edit(complete, "manifest.json", lambda m: m.update(top_k=5))
    assert "top_k=5" in refusal(load_recording, complete)
    edit(complete, "manifest.json", lambda m: m.update(top_k="20"))
    assert "top_k='20'" in refusal(load_recording, complete)


@pytest.mark.parametrize("segments", [None, [1, 2, 3, 4], {"a": 1}])
def test_segments_of_another_type(complete, segments):
    edit(complete, "complete.json", lambda m: m.update(segments=segments))
    assert "do not belong together" in refusal(load_recording, complete)
    edit(complete, "manifest.json", lambda m: m.update(segments=segments))
    assert "lists no segments" in refusal(load_recording, complete)


@pytest.mark.parametrize("name", ["manifest.json", "complete.json"])
def test_edited(complete, name):
    def change(value):
        segment = value["segments"][0]
        segment["kind" if "kind" in segment else "sha256"] = "0"

    edit(complete, name, change)
    assert "do not belong together" in refusal(load_recording, complete)


@pytest.mark.parametrize("name", ["ids", "values"])
def test_missing_array(complete, name):
    shutil.rmtree(complete / name)
    assert f"lacks its array {name}" in refusal(load_recording, complete)


def test_missing_cut_and_changed_chunks(complete):
    def flip(data):
        data = bytearray(data)
        data[-3] ^= 0xFF
        return bytes(data)

    for name, damage in (
        ("ids/c.0.0.0", lambda data: data[:40]),
        ("ids/c.1.0.0", None),
        ("values/c.2.0.0", lambda data: (complete / "values/c.3.0.0").read_bytes()),
        ("values/c.3.0.0", flip),
    ):
        before = (complete / name).read_bytes()
        if damage is None:
            (complete / name).unlink()
        else:
            (complete / name).write_bytes(damage(before))
        message = refusal(load_recording, complete)
        segment = make_segments()[int(name.split(".")[1])]["id"]
        assert f"damaged in 1 of 4 segments:\n  {segment}: " in message, name
        (complete / name).write_bytes(before)
    load_recording(complete)


def test_array_of_another_shape(complete):
    edit(complete, "values/zarr.json", lambda z: z.update(shape=[9, 9, 9]))
    assert "values" in refusal(load_recording, complete)


def test_non_finite_reference_made_elsewhere(tmp_path):
    # The writer refuses it; a file that claims to be a reference is checked when it is read.
    segments = make_segments()
    writer = RecordingWriter.create(tmp_path / "r", make_manifest(reference="f" * 64), segments)
    for index, segment in enumerate(segments):
        rows = make_rows(segment)
        if index == 2:
            rows["tail_logprob"][0] = np.nan
        writer.write(index, rows)
    writer.finish()
    load_recording(tmp_path / "r")
    edit(tmp_path / "r", "manifest.json", lambda m: m.update(reference=None))
    manifest = json.loads((tmp_path / "r" / "manifest.json").read_text())

    def seal(complete):
        complete["manifest_sha256"] = sha256_bytes(canonical_json(manifest))
        checksums = [segment["sha256"] for segment in complete["segments"]]
        complete["identity"] = recording_identity(manifest, checksums)

    edit(tmp_path / "r", "complete.json", seal)
    message = refusal(load_recording, tmp_path / "r")
    assert "NaN or infinite values in 1 rows" in message and "prose-2" in message


# Opening


def test_refuses_to_touch_a_complete_recording(complete):
    before = tree(complete)
    for open_ in (RecordingWriter.create, RecordingWriter.open_or_create):
        message = refusal(open_, complete, make_manifest(), make_segments())
        assert "already complete, made by this very producer" in message
        assert "--overwrite" in message
        message = refusal(open_, complete, make_manifest(device="tpu"), make_segments(3))
        assert 'device: recorded "cpu", now "tpu"' in message
        assert "segments[code-3]: recorded" in message
    assert tree(complete) == before


def test_resumes_only_the_same_producer(tmp_path):
    segments = make_segments()
    writer = RecordingWriter.create(tmp_path / "r", make_manifest(), segments)
    writer.write(0, make_rows(segments[0]))
    before = tree(tmp_path / "r")
    for changes in (
        {"commit": "other"},
        {"versions": {"jax": "0.12.0"}},
        {"batch_size": 1},
        {"kernels": {"attention.prefill": {"name": "a:b", "sha256": "1"}}},
        {"reference": "e" * 64},
        {"extras": {"full_kl": {"dtype": "float32", "shape": []}}},
    ):
        message = refusal(
            RecordingWriter.open_or_create, tmp_path / "r", make_manifest(**changes), segments
        )
        assert "incomplete recording of something else" in message
        assert f"\n  {next(iter(changes))}" in message and "One recording has one" in message
    message = refusal(RecordingWriter.create, tmp_path / "r", make_manifest(), segments)
    assert "incomplete recording of the same producer" in message
    assert tree(tmp_path / "r") == before
    relabelled = make_manifest(corpus={"name": "moved", "sha256": "d" * 64})
    again = RecordingWriter.open_or_create(tmp_path / "r", relabelled, segments)
    assert again.missing() == [1, 2, 3]


def test_overwriting_an_incomplete_recording_forgets_its_segments(tmp_path):
    segments = make_segments()
    writer = RecordingWriter.create(tmp_path / "r", make_manifest(), segments)
    writer.write(0, make_rows(segments[0]))
    other = make_manifest(device="tpu")
    again = RecordingWriter.open_or_create(tmp_path / "r", other, segments[1:], overwrite=True)
    assert again.missing() == [0, 1, 2]
    again = RecordingWriter.create(tmp_path / "r", other, segments[1:], overwrite=True)
    assert again.missing() == [0, 1, 2]


def test_refuses_a_place_that_holds_something_else(tmp_path):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1.tex").write_text("...")
    for overwrite in (False, True):
        message = refusal(
            RecordingWriter.open_or_create, tmp_path, make_manifest(), make_segments(), overwrite
        )
        assert "not empty and holds no recording" in message
    assert sorted(tree(tmp_path)) == ["thesis/chapter1.tex"]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda m, s: m.pop("policy"), "lacks policy"),
        (lambda m, s: m.update(model=None), "model=None"),
        (lambda m, s: m.update(top_k=10), "top_k=10"),
        (lambda m, s: m.update(schema_version=7), "schema_version=7"),
        (lambda m, s: m["extras"].update(top_ids={"dtype": "int32"}), "unusable name"),
        (lambda m, s: m["extras"].update({"../x": {"dtype": "int32"}}), "unusable name"),
        (lambda m, s: m["extras"].update(x={"dtype": "complex64"}), "dtype='complex64'"),
        (lambda m, s: m["extras"].update(x={"dtype": "int32", "shape": [0]}), "shape=[0]"),
        (lambda m, s: s.clear(), "no segment"),
        (lambda m, s: s[1].update(id=s[0]["id"]), "occur twice: prose-0"),
        (lambda m, s: s[1].pop("rows"), "Segment code-1 has rows=None"),
        (lambda m, s: s[1].update(rows=0), "rows=0"),
        (lambda m, s: s[0].update(kind=""), "kind=''"),
    ],
)
def test_bad_plans_touch_nothing(tmp_path, change, text):
    manifest, segments = make_manifest(), make_segments()
    change(manifest, segments)
    assert text in refusal(RecordingWriter.create, tmp_path / "r", manifest, segments)
    assert not (tmp_path / "r").exists()


# Writing


def setter(name, key, value):
    def change(rows):
        rows[name][key] = value

    return change


def swap_top_logprobs(rows):
    rows["top_logprobs"][3, [1, 2]] = rows["top_logprobs"][3, [2, 1]]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda rows: rows.pop("margins"), "missing: margins; unexpected: none"),
        (lambda rows: rows.update(kl=rows["pos"]), "unexpected: kl"),
        (lambda rows: rows.update(pos=rows["pos"].astype(np.int64)), "pos is int64 [7]"),
        (lambda rows: rows.update(top_ids=rows["top_ids"][:, :19]), "top_ids is int32 [7, 19]"),
        (lambda rows: rows.update({k: v[:5] for k, v in rows.items()}), "plan has 7 rows"),
        (setter("phase", -1, 3), "phase=3"),
        (setter("pos", -1, 64 + 10), "pos=74"),
        (setter("pos", 0, -1), "pos=-1"),
        (setter("pos", 4, 66), "row 5 has (phase, pos)=(1, 65) after (1, 66)"),
        (setter("phase", 0, 1), "ascend by phase"),
        (setter("pos", 3, 64), "each once"),
        (setter("target_ids", 2, 300), "target_ids holds 300"),
        (setter("top1_ids", 2, -1), "top1_ids holds -1"),
        (lambda rows: setter("top_ids", (3, 7), rows["top_ids"][3, 8])(rows), "an id twice"),
        (swap_top_logprobs, "top_logprobs rise within the row of pos 65"),
        (lambda rows: setter("top1_ids", 3, rows["top_ids"][3, 1])(rows), "top1_ids of pos 65"),
        (setter("margins", 3, -0.5), "margins of pos 65 is negative"),
        (setter("tail_logprob", 3, -0.01), "sum to 1."),
        (setter("top_logprobs", (3, 4), np.nan), "1 NaN or infinite values, first at pos 65"),
        (setter("tail_logprob", 3, -np.inf), "tail_logprob has 1 NaN or infinite"),
        (setter("target_logprobs", 3, -np.inf), "target_logprobs has 1"),
    ],
)
def test_bad_rows_of_a_reference(tmp_path, change, text):
    segments = make_segments(1)
    rows = make_rows(segments[0])
    if "row 5" in text:
        rows["pos"][5] = 65
    change(rows)
    writer = RecordingWriter.create(tmp_path / "r", make_manifest(), segments)
    message = refusal(writer.write, 0, rows)
    assert "Segment prose-0" in message and text in message
    assert writer.missing() == [0]


def test_undeclared_and_missing_extras(tmp_path):
    segments = make_segments(1)
    rows = make_rows(segments[0])
    writer = RecordingWriter.create(tmp_path / "a", make_manifest(), segments)
    message = refusal(writer.write, 0, rows, {"full_kl": rows["margins"]})
    assert "unexpected: full_kl" in message and "declared in the manifest" in message
    manifest = make_manifest(extras={"full_kl": {"dtype": "float32", "shape": []}})
    writer = RecordingWriter.create(tmp_path / "b", manifest, segments)
    assert "missing: full_kl" in refusal(writer.write, 0, rows)
    bad = np.full(7, np.inf, np.float32)
    assert "full_kl has 7 NaN or infinite" in refusal(writer.write, 0, rows, {"full_kl": bad})
    writer.write(0, rows, {"full_kl": rows["margins"]})


def test_writing_again_needs_the_same_values(tmp_path):
    segments = make_segments(1)
    writer = RecordingWriter.create(tmp_path / "r", make_manifest(), segments)
    writer.write(0, make_rows(segments[0]))
    before = tree(tmp_path / "r")
    writer.write(0, make_rows(segments[0]))
    assert "written before with other values" in refusal(
        writer.write, 0, make_rows(segments[0], seed=1)
    )
    assert tree(tmp_path / "r") == before


def test_finish_reads_back(tmp_path):
    segments = make_segments()
    writer = RecordingWriter.create(tmp_path / "r", make_manifest(), segments)
    for index, segment in enumerate(segments):
        writer.write(index, make_rows(segment))
    (tmp_path / "r" / "values" / "c.2.0.0").write_bytes(b"lost power here")
    message = refusal(writer.finish)
    assert "1 segments did not read back" in message and "prose-2" in message
    assert not (tmp_path / "r" / "complete.json").exists()
    assert writer.missing() == [2]
    writer.write(2, make_rows(segments[2]))
    writer.finish()
    load_recording(tmp_path / "r")


# Storage


def test_path_below_a_file(tmp_path):
    (tmp_path / "file").write_text("")
    message = refusal(
        RecordingWriter.create, tmp_path / "file" / "r", make_manifest(), make_segments()
    )
    assert message.startswith("Could not ") and "Check the path" in message
    assert "is a file" in refusal(
        RecordingWriter.create, tmp_path / "file", make_manifest(), make_segments()
    )


NO_PERMISSION = """
import os, sys
sys.path.insert(0, {tests!r})
from recording_rows import make_manifest, make_segments
from kernjax.base.errors import UserError
from kernjax.recording import RecordingWriter
if os.geteuid() == 0:
    os.seteuid(65534)  # root may write anywhere
try:
    RecordingWriter.create({path!r}, make_manifest(), make_segments())
except UserError as error:
    print(error)
"""


def run_python(code, path):
    code = code.format(tests=os.path.dirname(__file__), path=str(path))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip().splitlines()


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="no Unix permissions here")
def test_no_permission(tmp_path):
    (tmp_path / "closed").mkdir(mode=0o500)
    (message,) = run_python(NO_PERMISSION, tmp_path / "closed" / "r")
    assert message.startswith("Could not ") and "Check the permissions" in message


def test_unusable_urls():
    for url in ("gs://", "nosuchscheme://bucket/r"):
        assert "Could not open" in refusal(load_recording, url)


FULL_DISK = """
import resource, signal, sys
sys.path.insert(0, {tests!r})
from recording_rows import make_manifest, make_rows, make_segments
from kernjax.base.errors import UserError
from kernjax.recording import RecordingWriter
segments = make_segments(2, rows=200)
segments[0]["rows"] = 10
writer = RecordingWriter.create({path!r}, make_manifest(), segments)
# No file may grow past this: the system's answer to a write is then an error, as on a full disk.
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))
writer.write(0, make_rows(segments[0]))
try:
    writer.write(1, make_rows(segments[1]))
except UserError as error:
    print(error)
print(writer.missing())
"""


def test_full_disk(tmp_path):
    pytest.importorskip("resource")
    message, missing = run_python(FULL_DISK, tmp_path / "r")
    assert message.startswith("Could not write segment code-1 of ") and "Free space" in message
    assert missing == "[1]"
    assert "1 of 2 segments are missing (code-1)" in refusal(load_recording, tmp_path / "r")


# Comparing


def candidate_of(path, recording, change=None, **changes):
    segments = make_segments()
    policy = {"name": "bf16", "text": "bf16"}
    manifest = make_manifest(**{"reference": recording.identity, "policy": policy, **changes})
    rows = [make_rows(segment) for segment in segments]
    for arrays in rows:
        arrays["top_logprobs"] -= np.float32(0.01)
    if change is not None:
        change(segments, rows)
    writer = RecordingWriter.create(path, manifest, segments)
    for index, arrays in enumerate(rows):
        writer.write(index, arrays)
    writer.finish()
    return load_recording(path)


def test_comparable(complete, tmp_path):
    reference = load_recording(complete)
    check_comparable(reference, reference)
    candidate = candidate_of(tmp_path / "c", reference)
    check_comparable(reference, candidate)
    check_comparable(reference.select([1, 2]), candidate.select([1, 2]))


MODEL = make_manifest()["model"]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"model": {**MODEL, "weights_sha256": "9f3c" * 16}}, "model weights 9f3c9f3c9f3c… but"),
        ({"model": {**MODEL, "config_sha256": "9f3c" * 16}}, "config 9f3c9f3c9f3c… but"),
        ({"model": {**MODEL, "vocab_size": 301}}, "a vocabulary of 301"),
        ({"tokenizer_sha256": "9f3c" * 16}, "tokenizer 9f3c9f3c9f3c… but"),
        ({"corpus": {"name": "demo", "sha256": "9f3c" * 16}}, "corpus 9f3c9f3c9f3c… but"),
    ],
)
def test_other_subject(complete, tmp_path, changes, text):
    candidate = candidate_of(tmp_path / "c", load_recording(complete), **changes)
    message = refusal(check_comparable, load_recording(complete), candidate)
    assert text.replace(" but", "") in message and "reference" in message
    assert "cannot be compared" in message and "Record both" in message


def change_segment(key, value):
    def change(segments, rows):
        segments[1][key] = value

    return change


def drop_last(segments, rows):
    segments.pop()
    rows.pop()


def swap_segments(segments, rows):
    segments[0], segments[1] = segments[1], segments[0]
    rows[0], rows[1] = rows[1], rows[0]


def shift_pos(segments, rows):
    rows[2]["pos"][-1] += 1


def change_phase(segments, rows):
    rows[2]["phase"][-1] = 2


def change_target(segments, rows):
    rows[2]["target_ids"][4] = (rows[2]["target_ids"][4] + 1) % 300


def swap_ids(segments, rows):
    rows[2]["top_ids"][4, [0, 1]] = rows[2]["top_ids"][4, [1, 0]]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (drop_last, "- code-3: only in the reference"),
        (change_segment("context_len", 200), "~ code-1: context_len 128 in the reference, 200"),
        (change_segment("documents", [0, 11]), "~ code-1: documents [0, 10]"),
        (change_segment("kind", "prose"), "~ code-1: kind code in the reference, prose"),
        (swap_segments, "in another order"),
        (shift_pos, "positions do not correspond"),
        (change_phase, "has phase=2 where reference"),
        (change_target, "from the same tokens"),
        (swap_ids, "the ids of this very reference"),
    ],
)
def test_other_positions(complete, tmp_path, change, text):
    reference = load_recording(complete)
    candidate = candidate_of(tmp_path / "c", reference, change)
    assert text in refusal(check_comparable, reference, candidate)


def test_other_ids_say_what_they_were_scored_at(complete, tmp_path):
    reference = load_recording(complete)
    record(tmp_path / "own", seed=1)
    own = load_recording(tmp_path / "own")
    message = refusal(check_comparable, reference, own)
    assert "target_ids" in message  # the made-up tokens differ as well
    scored = candidate_of(tmp_path / "c", reference, swap_ids_everywhere, reference="7" * 64)
    message = refusal(check_comparable, reference, scored)
    assert "the ids of recording 777777777777…" in message
    assert f"--reference={reference.path}" in message and "segment prose-0, row 0" in message
    alone = candidate_of(tmp_path / "d", reference, own_ids, reference=None)
    assert "its own top ids" in refusal(check_comparable, reference, alone)
    record(tmp_path / "wide", top_k=24)
    wide = load_recording(tmp_path / "wide")
    assert "has 24 ids a row" in refusal(check_comparable, reference, wide)


def swap_ids_everywhere(segments, rows):
    for arrays in rows:
        arrays["top_ids"][:, [0, 1]] = arrays["top_ids"][:, [1, 0]]


def own_ids(segments, rows):
    for arrays in rows:
        arrays["top_logprobs"] += np.float32(0.01)
        arrays["top_ids"][:, [3, 4]] = arrays["top_ids"][:, [4, 3]]


def test_candidate_with_nan_is_comparable_but_no_reference(complete, tmp_path):
    reference = load_recording(complete)

    def poison(segments, rows):
        rows[1]["margins"][2] = np.nan

    candidate = candidate_of(tmp_path / "c", reference, poison)
    check_comparable(reference, candidate)
    assert "NaN or infinite" in refusal(check_comparable, candidate, reference)
