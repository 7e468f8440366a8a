"""check and calibrate, end to end on the tiny checkpoint: every colour, every refusal."""

from __future__ import annotations

import json
import textwrap

import pytest
from instrument import last_line, run

from kernjax import calibrate, check

NORMALS = ("bf16", "chunk32", "chunk128", "p_f32", "bf16,attention.block_k=32")


@pytest.fixture(scope="module")
def band(instrument):
    """A calibrated band of five normal producers."""
    out = instrument.folder / "band.json"
    code = run(
        calibrate, *instrument.subject, "--reference", str(instrument.reference),
        *(f"--normal={name}" for name in NORMALS), "--out", str(out),
        "--recordings_dir", str(instrument.folder / "normals"),
    )  # fmt: skip
    assert code == 0
    return out


def judged(instrument, band, capsys, *argv):
    code = run(
        check, *instrument.subject, "--reference", str(instrument.reference), "--band", str(band),
        *argv,
    )  # fmt: skip
    captured = capsys.readouterr()
    return code, captured.out, json.loads(captured.out.splitlines()[-1])


def test_a_gross_change_fails(instrument, band, capsys):
    code, text, line = judged(
        instrument, band, capsys, "--policy", "bf16,delta_rule.state=m1", "--noisolated"
    )
    assert code == 1 and line["verdict"] == "FAIL" and text.startswith("FAIL")
    assert line["exit_code"] == 1
    assert {"kl", "flips", "positions", "strata", "gates", "reference", "candidate", "band",
            "wall_s", "schema_version"} <= line.keys()  # fmt: skip


def test_a_thin_corpus_is_inconclusive(instrument, band, capsys):
    """Three segments a stratum carry no PASS, whatever the candidate."""
    normal = instrument.folder / "normals" / "chunk32"
    code, text, line = judged(instrument, band, capsys, "--candidate", str(normal))
    assert code == 2 and text.startswith("INCONCLUSIVE")


def test_the_incumbents_own_bits_pass_as_identical(instrument, band, capsys):
    normal = str(instrument.folder / "normals" / "bf16")
    code, _, line = judged(instrument, band, capsys, "--candidate", normal, "--incumbent", normal)
    assert code == 0 and line["identical"]


def test_output_dir_keeps_report_verdict_and_recordings(instrument, band, capsys, tmp_path):
    out = tmp_path / "out"
    judged(
        instrument, band, capsys, "--policy", "fp8", "--output_dir", str(out),
        "--isolated_limit", "2", "--twin", "--limit", "2",
    )  # fmt: skip
    assert {p.name for p in out.iterdir()} >= {"verdict.json", "report.txt", "candidate", "twin"}
    assert (out / "isolated" / "complete.json").is_file()
    assert json.loads((out / "verdict.json").read_text())["verdict"] in ("FAIL", "INCONCLUSIVE")


def test_a_kernel_of_ones_own(instrument, band, capsys, tmp_path, monkeypatch):
    """The manifest names it and its hash; one that returns NaN is a FAIL, not a crash."""
    (tmp_path / "my_kernels.py").write_text(
        textwrap.dedent(
            """
            import jax.numpy as jnp
            from pallas_kernels import attention

            def right(q, k, v, **options):
                return attention.prefill(q, k, v, **options, implementation="reference")

            def broken(q, k, v, **options):
                return jnp.full_like(right(q, k, v, **options), jnp.nan)

            def misshapen(q, k, v, **options):
                return right(q, k, v, **options)[..., :4]
            """
        )
    )
    monkeypatch.syspath_prepend(tmp_path)
    out = tmp_path / "out"
    code, _, line = judged(
        instrument, band, capsys, "--kernel", "attention.prefill=my_kernels:right", "--limit", "2",
        "--isolated_limit", "2", "--output_dir", str(out),
    )  # fmt: skip
    assert code in (0, 2)
    manifest = json.loads((out / "candidate" / "manifest.json").read_text())
    assert manifest["kernels"]["attention.prefill"]["name"] == "my_kernels:right"
    code, _, line = judged(
        instrument, band, capsys, "--kernel", "attention.prefill=my_kernels:broken", "--limit", "2",
        "--noisolated",
    )  # fmt: skip
    assert code == 1 and line["verdict"] == "FAIL"
    assert any("finite" in finding["text"] for finding in line["findings"])
    code = run(
        check, *instrument.subject, "--reference", str(instrument.reference), "--band", str(band),
        "--kernel", "attention.prefill=my_kernels:misshapen",
    )  # fmt: skip
    assert code == 3 and "my_kernels:misshapen" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags, message",
    [
        ([], "There is no candidate"),
        (["--policy", "fp8", "--candidate", "x"], "one candidate"),
        (["--candidate", "nowhere"], "nowhere"),
        (["--policy", "fp8", "--band", "nowhere.json"], "nowhere.json"),
        (["--policy", "fp88"], "fp8"),
        (["--policy", "fp8", "--incumbent", "nowhere"], "nowhere"),
    ],
)
def test_bad_flags(instrument, band, capsys, flags, message):
    code = run(
        check, *instrument.subject, "--reference", str(instrument.reference), "--band", str(band),
        *flags,
    )  # fmt: skip
    assert code == 3
    assert message in capsys.readouterr().err


def test_too_few_normals(instrument, capsys, tmp_path):
    folder = instrument.folder / "normals"
    code = run(
        calibrate, *instrument.subject, "--reference", str(instrument.reference),
        f"--normal={folder / 'bf16'}", f"--normal={folder / 'chunk32'}",
        "--out", str(tmp_path / "band.json"),
    )  # fmt: skip
    assert code == 3 and not (tmp_path / "band.json").exists()
    assert "exit_code" in last_line(capsys)
