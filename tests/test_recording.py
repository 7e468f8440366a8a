"""Round trips: what is written is read back, the same bytes every time, small and without jax."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import uuid

import numpy as np
import pytest
from recording_rows import make_manifest, make_rows, make_segments, record, tree

from kernjax.base.errors import UserError
from kernjax.recording import (
    RecordingWriter,
    build_manifest,
    identity_diff,
    load_recording,
    pack_recording,
)


def test_round_trip(tmp_path):
    written = record(tmp_path / "r")
    recording = load_recording(tmp_path / "r")
    for name in written[0]:
        array = getattr(recording, name)
        np.testing.assert_array_equal(array, np.concatenate([rows[name] for rows in written]))
        assert array.dtype == written[0][name].dtype
        assert array.flags.c_contiguous and not array.flags.writeable
    lengths = [len(rows["pos"]) for rows in written]
    assert len(set(lengths)) > 1, "the segments of this test are ragged"
    np.testing.assert_array_equal(recording.segment, np.repeat(np.arange(4), lengths))
    assert len(recording) == sum(lengths)
    assert recording.manifest["model"]["name"] == "tiny"
    assert recording.segments[1]["documents"] == [0, 10]
    assert list(recording.kinds) == ["prose", "code", "prose", "code"]
    assert list(recording.context_lens) == [64, 128, 64, 128]
    assert recording.rows_of(1) == recording.rows_of("code-1") == slice(7, 15)
    assert list(recording.non_finite) == [0, 0, 0, 0]
    with pytest.raises(KeyError, match="nowhere"):
        recording.rows_of("nowhere")


def test_segments_in_any_order_give_the_same_bytes(tmp_path):
    record(tmp_path / "a")
    segments = make_segments()
    writer = RecordingWriter.open_or_create(tmp_path / "b", make_manifest(), segments)
    for index in (2, 0, 3, 1):
        assert index in writer.missing()
        writer.write(index, make_rows(segments[index]))
        assert index not in writer.missing()
    identity = writer.finish()
    assert tree(tmp_path / "a") == tree(tmp_path / "b")
    assert identity == load_recording(tmp_path / "a").identity
    assert writer.missing() == [] and writer.finish() == identity


def test_identity_follows_content_and_producer(tmp_path):
    def identity(name, **changes):
        record(tmp_path / name, **changes)
        return load_recording(tmp_path / name).identity

    first = identity("a")
    assert identity("other content", seed=1) != first
    assert identity("other device", device="tpu v5p") != first
    assert identity("other batch", batch_size=8) != first
    assert identity("unknown key", seed_of_something=1) != first
    assert identity("other label", policy={"name": "mine", "text": "f32", "fields": {}}) == first
    assert identity("other commit", commit="fedcba9") == first


def test_extras(tmp_path):
    specs = {
        "hidden_bits": {"dtype": "float32", "shape": [3]},
        "full_kl": {"dtype": "float64", "shape": []},
        "routes": {"dtype": "int32", "shape": [2, 4]},
        "flags": {"dtype": "uint8"},
    }
    segments = make_segments(2)
    rng = np.random.default_rng(0)
    extras = [
        {
            "hidden_bits": rng.normal(size=(n, 3)).astype(np.float32),
            "full_kl": rng.normal(size=n),
            "routes": rng.integers(0, 99, (n, 2, 4)).astype(np.int32),
            "flags": rng.integers(0, 2, n).astype(np.uint8),
        }
        for n in (segment["rows"] for segment in segments)
    ]
    writer = RecordingWriter.create(tmp_path / "r", make_manifest(extras=specs), segments)
    for index, segment in enumerate(segments):
        writer.write(index, make_rows(segment), extras[index])
    writer.finish()
    recording = load_recording(tmp_path / "r")
    assert recording.extras.keys() == specs.keys()
    for name, array in recording.extras.items():
        np.testing.assert_array_equal(array, np.concatenate([extra[name] for extra in extras]))
        assert array.dtype == specs[name]["dtype"]


def test_candidate_keeps_nan_bits_and_counts_them(tmp_path):
    segments = make_segments(3)
    writer = RecordingWriter.create(tmp_path / "r", make_manifest(reference="f" * 64), segments)
    all_rows = [make_rows(segment) for segment in segments]
    all_rows[1]["top_logprobs"][3, 5] = np.nan
    all_rows[1]["margins"][4] = -np.inf
    all_rows[2]["top_logprobs"][:] = all_rows[2]["top_logprobs"][:, ::-1]
    for index, rows in enumerate(all_rows):
        writer.write(index, rows)
    writer.finish()
    recording = load_recording(tmp_path / "r")
    assert list(recording.non_finite) == [0, 2, 0]
    stored = recording.top_logprobs.view(np.int32)
    given = np.concatenate([rows["top_logprobs"] for rows in all_rows])
    np.testing.assert_array_equal(stored, given.view(np.int32))


def test_more_than_twenty_ids(tmp_path):
    record(tmp_path / "r", top_k=32)
    assert load_recording(tmp_path / "r").top_ids.shape[1] == 32


def test_select(tmp_path):
    record(tmp_path / "r", count=5)
    whole = load_recording(tmp_path / "r")
    part = whole.select(["code-3", 1])
    assert [segment["id"] for segment in part.segments] == ["code-1", "code-3"]
    assert part.identity == whole.identity
    np.testing.assert_array_equal(np.unique(part.segment), [0, 1])
    for index, name in enumerate(("code-1", "code-3")):
        for field in ("pos", "top_ids", "margins"):
            np.testing.assert_array_equal(
                getattr(part, field)[part.rows_of(index)],
                getattr(whole, field)[whole.rows_of(name)],
            )


def test_about_200_bytes_a_position(tmp_path):
    # Ids as scattered as a vocabulary of 150 000 gives them; ragged; 10 000 rows.
    segments = make_segments(count=40, rows=249)
    scatter = np.random.default_rng(1).permutation(150_000).astype(np.int32)
    manifest = make_manifest(model={"weights_sha256": "a", "vocab_size": 150_000})
    writer = RecordingWriter.create(tmp_path / "r", manifest, segments)
    for index, segment in enumerate(segments):
        rows = make_rows(segment)
        for name in ("top_ids", "target_ids", "top1_ids"):
            rows[name] = scatter[rows[name] + 300 * index]
        writer.write(index, rows)
    writer.finish()
    count = len(load_recording(tmp_path / "r"))
    size = sum(file.stat().st_size for file in (tmp_path / "r").rglob("*") if file.is_file())
    assert count >= 9_990
    assert size / count <= 210


def test_a_short_segment_beside_a_long_one_costs_nothing(tmp_path):
    segments = make_segments(2)
    segments[1] |= {"rows": 3000, "score_len": 3000}
    writer = RecordingWriter.create(tmp_path / "r", make_manifest(), segments)
    for index, segment in enumerate(segments):
        writer.write(index, make_rows(segment))
    writer.finish()
    chunks = [(tmp_path / "r" / name / "c.0.0.0").stat().st_size for name in ("ids", "values")]
    assert sum(chunks) < segments[0]["rows"] * 200 + 1500


def test_not_only_on_disks():
    name = f"memory://{uuid.uuid4()}/r"
    written = record(name)
    recording = load_recording(name)
    np.testing.assert_array_equal(recording.pos, np.concatenate([r["pos"] for r in written]))
    with pytest.raises(UserError, match="already complete"):
        RecordingWriter.open_or_create(name, make_manifest(), make_segments())
    segments = make_segments()
    writer = RecordingWriter.create(name, make_manifest(), segments, overwrite=True)
    for index, segment in enumerate(segments):
        writer.write(index, make_rows(segment, seed=1))
    assert load_recording(name).identity == recording.identity
    writer.finish()
    assert load_recording(name).identity != recording.identity


def test_packed_is_the_same_recording_in_one_file(tmp_path):
    record(tmp_path / "a")
    record(tmp_path / "b")
    pack_recording(tmp_path / "a", tmp_path / "a.zip")
    pack_recording(tmp_path / "b", tmp_path / "b.zip")
    assert (tmp_path / "a.zip").read_bytes() == (tmp_path / "b.zip").read_bytes()
    packed, plain = load_recording(tmp_path / "a.zip"), load_recording(tmp_path / "a")
    assert packed.identity == plain.identity
    for field in dataclasses.fields(plain):
        if isinstance(getattr(plain, field.name), np.ndarray):
            np.testing.assert_array_equal(getattr(plain, field.name), getattr(packed, field.name))
    with pytest.raises(UserError, match="exists"):
        pack_recording(tmp_path / "a", tmp_path / "a.zip")
    with pytest.raises(UserError, match=r"\.zip"):
        pack_recording(tmp_path / "a", tmp_path / "a.tar")
    (tmp_path / "cut.zip").write_bytes((tmp_path / "a.zip").read_bytes()[:-40])
    with pytest.raises(UserError, match="cut.zip"):
        load_recording(tmp_path / "cut.zip")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "a.zip", "b", "b.zip", "cut.zip"]


def test_identity_diff_shows_both_sides():
    a = make_manifest()
    assert identity_diff(a, make_manifest()) == []
    assert identity_diff(a, make_manifest(model={**a["model"], "name": "elsewhere"})) == []
    b = make_manifest(
        policy={"name": "f32", "text": "bf16", "fields": {"p": "bf16"}}, mesh=None, commit="9"
    )
    assert identity_diff(a, b, ("here", "there")) == [
        'commit: here "0123abc", there "9"',
        "mesh: here absent, there null",
        "mesh.data: here 1, there absent",
        "policy.fields: here {}, there absent",
        'policy.fields.p: here absent, there "bf16"',
        'policy.text: here "f32", there "bf16"',
    ]
    segments = make_segments(2)
    changed = [{**segments[0], "rows": 99}]
    lines = identity_diff({"segments": segments}, {"segments": changed})
    assert lines[0] == 'segment order: recorded ["prose-0", "code-1"], now ["prose-0"]'
    assert lines[1].startswith("segments[code-1]: recorded {") and lines[1].endswith("now absent")
    assert lines[2] == 'segments[prose-0]: recorded {"rows": 7}, now {"rows": 99}'


def test_manifest_is_plain_json():
    manifest = build_manifest(
        model={"vocab_size": np.int64(7)},
        corpus={},
        policy={"fields": {"scale": np.float32(0.5), "layers": (1, 2)}},
        batch_size=np.int32(3),
    )
    assert type(manifest["model"]["vocab_size"]) is int
    assert manifest["policy"]["fields"] == {"scale": 0.5, "layers": [1, 2]}
    assert manifest["reference"] is None and manifest["top_k"] == 20


def test_importing_needs_no_jax():
    code = (
        "import sys; sys.modules['jax'] = None; import kernjax.recording as r;"
        "from kernjax import load_recording; assert load_recording is r.load_recording;"
        "assert not [m for m in sys.modules if m.startswith(('jax.', 'flax', 'kernjax.model'))]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_extras_per_token_are_as_long_as_what_was_read(tmp_path):
    segments = make_segments(3)
    spec = {"dtype": "uint16", "shape": [2, 3], "per": "token"}
    writer = RecordingWriter.create(
        tmp_path / "r", make_manifest(extras={"experts": spec}), segments
    )
    rng, written = np.random.default_rng(0), []
    for index, segment in enumerate(segments):
        tokens = segment["context_len"] + segment["score_len"]
        written.append(rng.integers(0, 60_000, (tokens, 2, 3)).astype(np.uint16))
        with pytest.raises(UserError, match=f"experts is uint16.*{tokens}, 2, 3"):
            writer.write(index, make_rows(segment), {"experts": written[-1][1:]})
        writer.write(index, make_rows(segment), {"experts": written[-1]})
    writer.finish()
    recording = load_recording(tmp_path / "r")
    assert recording.extras == {} and len(recording.token_extras["experts"]) == 3
    for part, whole in zip(recording.token_extras["experts"], written, strict=True):
        np.testing.assert_array_equal(part, whole)
    (chosen,) = recording.select([segments[1]["id"]]).token_extras["experts"]
    np.testing.assert_array_equal(chosen, written[1])


def test_extras_per_token_are_whole_numbers(tmp_path):
    for change in ({"dtype": "float32"}, {"per": "layer"}):
        spec = {"dtype": "uint8", "shape": [2], "per": "token"} | change
        with pytest.raises(UserError, match="Expected 'row', or 'token' for whole numbers"):
            RecordingWriter.create(
                tmp_path / "r", make_manifest(extras={"experts": spec}), make_segments(1)
            )
