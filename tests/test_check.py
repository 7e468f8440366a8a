"""check and calibrate on the bundled demo: every colour, every refusal."""

from __future__ import annotations

import json
import shutil
import textwrap
from pathlib import Path

import jsonschema
import pytest
from instrument import last_line, run

from kernjax import calibrate, check, load_recording, report, reporting
from kernjax.base.resources import data_dir, demo_dir, demo_recording

NORMALS = ("bf16", "chunk32", "chunk128", "block256", "p_f32", "row_sum_rounded")


def bundled(name: str) -> str:
    return str(demo_recording(f"demo.{name}.zip"))


def judged(capsys, *argv):
    code = run(check, *argv)
    captured = capsys.readouterr()
    return code, captured.out, json.loads(captured.out.splitlines()[-1])


@pytest.mark.parametrize("name", NORMALS)
def test_a_normal_producer_is_not_red(capsys, name):
    code, text, line = judged(capsys, "--candidate", bundled(name))
    assert code in (0, 2) and line["verdict"] in ("PASS", "INCONCLUSIVE")
    assert text.startswith(line["verdict"])
    assert line["exit_code"] == code
    assert {"kl", "flips", "positions", "strata", "gates", "reference", "candidate", "band",
            "wall_s", "schema_version"} <= line.keys()  # fmt: skip


def test_most_normal_producers_pass(capsys):
    codes = [judged(capsys, "--candidate", bundled(name))[0] for name in NORMALS]
    assert codes.count(0) >= len(NORMALS) // 2


@pytest.fixture
def copied(tmp_path):
    """Another recording of the same bits."""
    return shutil.copy(bundled("bf16"), tmp_path / "again.zip")


def test_the_incumbents_own_bits_pass_as_identical(capsys, copied):
    code, _, line = judged(capsys, "--candidate", bundled("bf16"), "--incumbent", str(copied))
    assert code == 0 and line["identical"]


@pytest.mark.parametrize("flag", ["again", "incumbent"])
def test_a_recording_is_not_set_beside_itself(capsys, flag):
    code, _, line = judged(capsys, "--candidate", bundled("bf16"), f"--{flag}", bundled("bf16"))
    assert code == 3 and f"--{flag} and --candidate are the same recording" in line["error"]


def test_the_mistake_itself_is_named_not_the_reference_it_lacks(capsys, tmp_path):
    code, _, line = judged(capsys, "--policy", "fp8_scaled", "--model", str(tmp_path))
    assert code == 3 and "has no config.json" in line["error"]
    manifest = data_dir("corpora") / "demo.toml"
    damaged = manifest.read_text().replace('sha256 = "', 'sha256 = "0', 1)
    (tmp_path / "demo.toml").write_text(damaged)
    shutil.copy(manifest.with_suffix(".npz"), tmp_path)
    flags = ["--policy", "fp8_scaled", "--corpus", str(tmp_path / "demo.toml")]
    code, _, line = judged(capsys, *flags)
    assert code == 3 and "sha256" in line["error"]


def test_a_cut_zip_is_called_that(capsys, tmp_path):
    cut = tmp_path / "cut.zip"
    cut.write_bytes(Path(bundled("chunk32")).read_bytes()[:20000])
    code, _, line = judged(capsys, "--candidate", str(cut))
    assert code == 3 and "cut short" in line["error"] and "Copy it again" in line["error"]


def test_what_could_not_be_judged_leaves_no_older_report(capsys, tmp_path):
    out = ["--output_dir", str(tmp_path / "out")]
    assert judged(capsys, "--candidate", bundled("chunk32"), *out)[0] == 0
    assert (tmp_path / "out" / "junit.xml").exists()
    assert judged(capsys, "--candidate", str(tmp_path / "none.zip"), *out)[0] == 3
    assert not list((tmp_path / "out").iterdir())


def test_a_second_recording_must_be_bitwise_equal(capsys, copied):
    flags = ["--candidate", bundled("bf16"), "--again"]
    _, _, line = judged(capsys, *flags, str(copied))
    assert not any("bitwise" in finding["text"] for finding in line["findings"])
    code, _, line = judged(capsys, *flags, bundled("chunk32"))
    assert code == 2
    (finding,) = [f for f in line["findings"] if "not bitwise equal" in f["text"]]
    assert "rows differ in KL, by at most" in finding["text"]


def test_the_reference_itself_is_no_candidate(capsys):
    """Bitwise the ground truth: nothing ran in production precision."""
    code, _, line = judged(capsys, "--candidate", bundled("f32"))
    assert code == 2 and line["verdict"] == "INCONCLUSIVE"


def test_a_gross_change_fails(capsys, tmp_path):
    """A recurrent state of two bits; report, verdict and recording are kept."""
    out = tmp_path / "out"
    code, text, line = judged(
        capsys, "--policy", "bf16,delta_rule.state=m2", "--limit", "3", "--noisolated",
        "--output_dir", str(out),
    )  # fmt: skip
    assert code == 1 and line["verdict"] == "FAIL" and text.startswith("FAIL")
    names = {p.name for p in out.iterdir()}
    assert {"verdict.json", "report.txt", "report.md", "junit.xml", "candidate"} <= names
    assert json.loads((out / "verdict.json").read_text())["verdict"] == "FAIL"
    # A finished recording of the same producer is taken as it is, through another door too.
    again, _, _ = judged(capsys, "--candidate", str(out / "candidate"))
    assert again == 1


def test_the_reports_of_a_run(capsys, tmp_path, monkeypatch):
    """Every file, the line under its schema, annotations on standard error, and once more drawn."""
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    out, again = tmp_path / "out", tmp_path / "again"
    code = run(check, "--candidate", bundled("chunk32"), "--output_dir", str(out))
    captured = capsys.readouterr()
    line = json.loads(captured.out.splitlines()[-1])
    schema = Path(reporting.__file__).parent / "schemas" / "check-1.schema.json"
    jsonschema.validate(line, json.loads(schema.read_text()))
    assert line == json.loads((out / "verdict.json").read_text())
    assert line["command"].startswith("python -m kernjax.check --candidate=")
    assert f"title=kernjax%3A {line['verdict']}::" in captured.err and "::" not in captured.out
    names = {path.name for path in out.iterdir()}
    assert names == {"verdict.json", "report.txt", "report.md", "junit.xml", "report.html",
                     "figures.json"}  # fmt: skip
    assert captured.out.startswith((out / "report.txt").read_text())
    assert run(report, f"--verdict={out}", f"--output_dir={again}") == 0
    for name in names:
        assert (again / name).read_text() == (out / name).read_text(), name
    assert code == line["exit_code"]


def test_a_folder_it_cannot_write_is_found_out_first(capsys, tmp_path):
    (tmp_path / "file").write_text("")
    argv = ["--candidate", bundled("chunk32"), "--output_dir", str(tmp_path / "file")]
    assert run(check, *argv) == 3
    captured = capsys.readouterr()
    assert "Could not write" in captured.err and "PASS" not in captured.out


KERNELS = """
import jax.numpy as jnp
from pallas_kernels import attention

def right(q, k, v, **options):
    return attention.prefill(q, k, v, **options)

def broken(q, k, v, **options):
    return jnp.full_like(right(q, k, v, **options), jnp.nan)

def misshapen(q, k, v, **options):
    return right(q, k, v, **options)[..., :4]
"""


def test_a_kernel_that_returns_nan_fails(capsys, tmp_path, monkeypatch):
    """A FAIL, not a crash; the manifest names the kernel, and says which file it was."""
    (tmp_path / "my_kernels.py").write_text(textwrap.dedent(KERNELS))
    monkeypatch.syspath_prepend(tmp_path)
    out = tmp_path / "out"
    code, _, line = judged(
        capsys, "--kernel", "attention.prefill=my_kernels:broken", "--limit", "1", "--noisolated",
        "--output_dir", str(out),
    )  # fmt: skip
    assert code == 1 and line["verdict"] == "FAIL"
    assert any("finite" in finding["text"] for finding in line["findings"])
    kernel = json.loads((out / "candidate" / "manifest.json").read_text())["kernels"]
    assert kernel["attention.prefill"]["name"] == "my_kernels:broken"
    assert len(kernel["attention.prefill"]["sha256"]) == 64


def test_a_kernel_of_a_wrong_shape_is_refused(capsys, tmp_path, monkeypatch):
    (tmp_path / "misshapen_kernels.py").write_text(textwrap.dedent(KERNELS))
    monkeypatch.syspath_prepend(tmp_path)
    code = run(check, "--kernel", "attention.prefill=misshapen_kernels:misshapen", "--limit", "1")
    assert code == 3 and "misshapen_kernels:misshapen" in capsys.readouterr().err


NAMED = [
    *("--candidate", bundled("bf16"), "--reference", bundled("f32")),
    *("--band", str(demo_recording("demo.band.json"))),
]


def test_the_references_own_model_and_corpus_may_be_named(capsys, tmp_path):
    shutil.copytree(demo_dir(), tmp_path / "model")
    named = [*NAMED, "--corpus", str(data_dir("corpora") / "demo.toml")]
    assert judged(capsys, *named, "--model", str(tmp_path / "model"))[0] == 0
    (tmp_path / "model" / "config.json").write_text("{}")
    code, _, line = judged(capsys, *named, "--model", str(tmp_path / "model"))
    assert code == 3 and "is not what" in line["error"]


@pytest.mark.parametrize(
    "flags, message",
    [
        ([], "There is no candidate"),
        (["--policy", "fp8", "--candidate", "x"], "one candidate"),
        (["--candidate", "nowhere"], "nowhere"),
        (["--candidate", bundled("bf16"), "--limit", "1"], "--limit is given beside --candidate"),
        (
            ["--candidate", bundled("bf16"), "--production_policy", "nonsense"],
            "--production_policy is given beside --candidate",
        ),
        (
            ["--candidate", bundled("bf16"), "--mesh", "x", "--repeat", "--batch_size", "1"],
            "--repeat, --batch_size and --mesh are given beside --candidate",
        ),
        (["--candidate", bundled("bf16"), "--incumbent="], "--incumbent is given without a value"),
        (["--candidate", bundled("bf16"), "--noisolated"], "--noisolated is given beside"),
        (["--policy", "fp8", "--noisolated", "--isolated_limit", "2"], "beside --noisolated"),
        (["--policy", "fp8", "--production_policy", "nonsense"], "nonsense"),
        (["--policy", "fp8", "--mirror", "nowhere"], "is of ids"),
        ([*NAMED, "--corpus", "demo-deep"], "--corpus=demo-deep is not what"),
        ([*NAMED, "--corpus", "nowhere"], "nowhere"),
        ([*NAMED, "--model", "nowhere"], "no config.json"),
        (["--policy", "fp8", "--band", "nowhere.json"], "nowhere.json"),
        (["--policy", "fp88"], "fp8"),
        (["--candidate", bundled("bf16"), "--incumbent", "nowhere"], "nowhere"),
        (["--policy", "fp8", "--corpus", "local"], "bundled"),
    ],
)
def test_bad_flags(capsys, flags, message):
    assert run(check, *flags) == 3
    captured = capsys.readouterr()
    assert message in captured.err and "Traceback" not in captured.err


def test_calibrate_gives_the_bundled_band_again(capsys, tmp_path):
    out = tmp_path / "band.json"
    normals = [f"--normal={bundled(name)}" for name in NORMALS]
    assert run(calibrate, *normals, "--out", str(out)) == 0
    ours, theirs = (
        json.loads(path.read_text()) for path in (out, demo_recording("demo.band.json"))
    )
    for name in ("limits", "margins", "strata", "normals", "detection_floor", "segments"):
        assert ours[name] == theirs[name], name
    capsys.readouterr()
    assert run(calibrate, *normals, "--out", str(out)) == 3
    assert "--overwrite" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--production_policy", "nonsense"], "nonsense"),
        (["--mesh", "x", "--recordings_dir", "y"], "--recordings_dir and --mesh are given beside"),
        (["--batch_size", "3"], "--batch_size is given beside finished recordings only"),
        (["--mirror", "nowhere"], "is of ids"),
    ],
)
def test_flags_that_calibrate_would_not_read(capsys, tmp_path, flags, message):
    out = tmp_path / "band.json"
    normals = [f"--normal={bundled(name)}" for name in NORMALS]
    assert run(calibrate, *normals, *flags, "--out", str(out)) == 3
    assert message in last_line(capsys)["error"] and not out.exists()


def test_too_few_normals_make_no_band(capsys, tmp_path):
    out = tmp_path / "band.json"
    code = run(
        calibrate, f"--normal={bundled('bf16')}", f"--normal={bundled('p_f32')}", "--out", str(out)
    )
    assert code == 3 and not out.exists()
    assert last_line(capsys)["exit_code"] == 3


def test_a_planted_fault_is_known_bad(capsys, tmp_path, monkeypatch):
    """Recorded through the plug-in door; a band that it stays below is refused with the gap."""
    asked = []

    def record(self, policy, out, kernels=None, **_):
        asked.append((str(policy), sorted(kernels)))
        return load_recording(bundled("p_f32"))

    monkeypatch.setattr("kernjax.scoring.session.Session.record", record)
    out = tmp_path / "band.json"
    normals = [f"--normal={bundled(name)}" for name in NORMALS if name != "p_f32"]
    assert run(calibrate, *normals, "--bad", "k_scale_ignored", "--out", str(out)) == 3
    ((policy, ops),) = asked
    assert policy == "bf16,kv_cache.k_scale=0.25,kv_cache.v_scale=0.5"
    assert ops == ["attention.decode", "attention.prefill"]
    error = capsys.readouterr().err
    assert "stays below what this band allows" in error and "a gap of" in error
    assert not out.exists()
