"""record: what it writes, that it repeats, resumes and refuses."""

from __future__ import annotations

import filecmp
import json
import resource
import shutil

import numpy as np
import pytest
from instrument import LAYERS, last_line, run
from tiny import make_corpus, write_checkpoint

from kernjax import load_recording, record
from kernjax.base.errors import UserError
from kernjax.scoring import recorder
from kernjax.texts import load_corpus, write_corpus


def test_rows_are_what_the_design_says(instrument):
    recording = load_recording(instrument.reference)
    corpus = load_corpus(instrument.corpus)
    assert len(recording.segments) == 12
    for index, segment in enumerate(corpus.segments):
        rows = recording.rows_of(segment.id)
        assert recording.segments[index]["id"] == segment.id
        phase, pos = recording.phase[rows], recording.pos[rows]
        decoded = pos[phase == 1]
        np.testing.assert_array_equal(decoded, segment.context_len + np.arange(segment.score_len))
        assert segment.context_len - 1 in pos[phase == 0]
        np.testing.assert_array_equal(recording.target_ids[rows], segment.tokens[pos + 1])
    mass = np.exp(recording.top_logprobs.astype(np.float64)).sum(1)
    mass += np.exp(recording.tail_logprob.astype(np.float64))
    np.testing.assert_allclose(mass, 1, atol=1e-5)
    np.testing.assert_array_equal(recording.top1_ids, recording.top_ids[:, 0])
    assert (recording.margins >= 0).all()


def test_same_command_same_bytes(instrument, tmp_path):
    assert instrument.record(record, "--out", str(tmp_path / "again")) == 0
    names = [p.relative_to(instrument.reference) for p in instrument.reference.rglob("*")]
    files = [str(n) for n in names if (instrument.reference / n).is_file()]
    _, mismatch, errors = filecmp.cmpfiles(
        instrument.reference, tmp_path / "again", files, shallow=False
    )
    assert files and not mismatch and not errors


def test_the_batch_that_was_missing_is_recorded_again(instrument, tmp_path, monkeypatch, capsys):
    """Stopped after the first batch; the same command goes on and gives the same identity."""
    written = []
    write = recorder.RecordingWriter.write

    def stop_after_six(self, index, rows, extras=None):
        if len(written) == 6:
            raise KeyboardInterrupt
        written.append(index)
        return write(self, index, rows, extras)

    out = tmp_path / "stopped"
    with monkeypatch.context() as patch:
        patch.setattr(recorder.RecordingWriter, "write", stop_after_six)
        assert instrument.record(record, "--out", str(out)) == 3
    assert (
        last_line(capsys)["error"]
        == "interrupted. A recording that was begun goes on with the same command."
    )
    assert run(record_check(), "--candidate", str(out), "--reference", str(instrument.reference),
               "--band", "none.json") == 3  # fmt: skip
    capsys.readouterr()
    assert instrument.record(record, "--out", str(out)) == 0
    assert last_line(capsys)["identity"] == load_recording(instrument.reference).identity


def test_a_disk_that_fills_up(instrument, tmp_path, monkeypatch, capsys):
    """Exit 3 in one sentence, nothing that looks whole; with room again the same goes on."""
    out, written = tmp_path / "full", []
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    write = recorder.RecordingWriter.write

    def write_until_full(self, index, rows, extras=None):
        if len(written) == 4:
            # No file may grow past this: writing then fails as on a full disk.
            resource.setrlimit(resource.RLIMIT_FSIZE, (256, limits[1]))
        written.append(index)
        return write(self, index, rows, extras)

    with monkeypatch.context() as patch:
        patch.setattr(recorder.RecordingWriter, "write", write_until_full)
        try:
            assert instrument.record(record, "--out", str(out)) == 3
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    printed = capsys.readouterr()
    assert "Traceback" not in printed.err
    assert "Could not write segment" in json.loads(printed.out.splitlines()[-1])["error"]
    with pytest.raises(UserError, match="8 of 12 segments are missing"):
        load_recording(out)
    assert instrument.record(record, "--out", str(out)) == 0
    assert last_line(capsys)["identity"] == load_recording(instrument.reference).identity


def record_check():
    from kernjax import check

    return check


def test_a_candidate_is_scored_at_the_references_ids(instrument, tmp_path):
    out = tmp_path / "bf16"
    code = instrument.record(
        record, "--policy", "bf16", "--reference", str(instrument.reference), "--out", str(out)
    )
    assert code == 0
    ours, theirs = load_recording(instrument.reference), load_recording(out)
    np.testing.assert_array_equal(ours.top_ids, theirs.top_ids)
    np.testing.assert_array_equal(ours.pos, theirs.pos)
    difference = np.abs(ours.top_logprobs - theirs.top_logprobs).max()
    assert 1e-4 < difference < 0.5
    assert theirs.manifest["reference"] == ours.identity


def test_rescore_agrees_with_decode(instrument, tmp_path):
    """Decode against one prefill of the same tokens: an oracle that needs no reference."""
    out = tmp_path / "rescored"
    assert instrument.record(record, "--rescore", "--out", str(out)) == 0
    recording = load_recording(out)
    decode, rescore = recording.phase == 1, recording.phase == 2
    np.testing.assert_array_equal(recording.pos[decode], recording.pos[rescore])
    np.testing.assert_allclose(
        recording.target_logprobs[decode], recording.target_logprobs[rescore], atol=5e-5
    )


def test_hidden_sketches_tell_the_layer(instrument, tmp_path):
    """A change at layer 1 leaves layer 0's sketch as it was, bit for bit."""
    sketches = {}
    for name, policy in (("plain", "f32"), ("changed", "f32,attention.p=fp8@layers=1")):
        out = tmp_path / name
        assert instrument.record(
            record, "--hidden", "--limit", "1", "--policy", policy, "--out", str(out),
            "--reference", str(instrument.reference),
        ) == 0  # fmt: skip
        sketches[name] = load_recording(out).extras["hidden_sketch"]
    assert sketches["plain"].shape[1:] == (2, 32)
    np.testing.assert_array_equal(sketches["plain"][:, 0], sketches["changed"][:, 0])
    assert not np.array_equal(sketches["plain"][:, 1], sketches["changed"][:, 1])


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--policy", "bf61"], "bf16"),
        (["--policy", "bf16,attention.pp=fp8"], "attention.p"),
        (["--policy", "bf16,attention.p=fp9"], "fp8"),
        (["--policy", "bf16,attention.p=fp8@layers=0"], "layer 0"),
        (["--policy", "f32,delta_rule.v_new=bf16@layers=7"], "2 layers"),
        (["--corpus", "nowhere"], "nowhere"),
        (["--model", "nowhere"], "nowhere"),
        (["--kernel", "attention.prefil=a:b"], "attention.prefill"),
        (["--kernel", "attention.prefill=no_such_module:f"], "no_such_module"),
        (["--reference", "nowhere"], "nowhere"),
        (["--mesh", "tensor=3"], "devices"),
        (["--batch_size", "0"], "batch_size"),
        (["--polcy", "f32"], "--policy"),
    ],
)
def test_bad_input_is_refused_with_what_was_expected(instrument, tmp_path, capsys, flags, message):
    out = tmp_path / "out"
    assert instrument.record(record, "--out", str(out), *flags) == 3
    captured = capsys.readouterr()
    assert message in captured.err
    assert "Traceback" not in captured.err
    assert not out.exists()


def test_an_existing_recording_is_not_touched(instrument, capsys):
    before = load_recording(instrument.reference).identity
    assert instrument.record(record, "--policy", "bf16", "--out", str(instrument.reference)) == 3
    assert "--overwrite" in capsys.readouterr().err
    assert load_recording(instrument.reference).identity == before


def test_ids_outside_the_vocabulary(instrument, tmp_path, capsys):
    model = write_checkpoint(tmp_path / "small", **LAYERS, vocab_size=32)
    assert instrument.record(record, "--model", str(model), "--out", str(tmp_path / "out")) == 3
    assert "outside the model's vocabulary" in capsys.readouterr().err


def test_a_reference_of_another_corpus(instrument, tmp_path, capsys):
    other = write_corpus(make_corpus({48: 2}, score_len=4), tmp_path / "corpus")
    assert instrument.record(
        record, "--corpus", str(other), "--reference", str(instrument.reference),
        "--out", str(tmp_path / "out"),
    ) == 3  # fmt: skip
    assert "positions do not correspond" in capsys.readouterr().err


def test_a_cut_checkpoint(instrument, tmp_path, capsys):
    model = tmp_path / "cut"
    shutil.copytree(instrument.model, model)
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert instrument.record(record, "--model", str(model), "--out", str(tmp_path / "out")) == 3
    assert "Traceback" not in capsys.readouterr().err
