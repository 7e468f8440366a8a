"""How commands run: flags, manual, exit codes, one line instead of a traceback."""

from __future__ import annotations

import io
import json
import os
import shlex
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from kernjax import __main__ as entry
from kernjax.base import command
from kernjax.base.errors import UserError

INTERRUPTED = "interrupted. A recording that was begun goes on with the same command."

ROOT = Path(__file__).resolve().parent.parent


def make_flags() -> command.Flags:
    flags = command.Flags("toy", "Judges a toy.\n\nThe manual of the toy.\n")
    flags.string("model", None, "Directory of the toy.", required=True)
    flags.heading("How")
    flags.integer("batch_size", 4, "Segments at a time.", lower_bound=1)
    flags.number("level", 0.5, "Confidence.", lower_bound=0.0, upper_bound=1.0)
    flags.enum("engine", "jax", ["jax", "transformers"], "Who computes.")
    flags.boolean("overwrite", False, "Replaces what is there.")
    flags.multi_string("kernel", "OP=module:function.")
    return flags


def run_toy(argv, main=lambda words: 0, flags=None) -> int:
    return command.execute(main, flags or make_flags(), argv)


def last_json(text: str) -> dict:
    return json.loads(text.splitlines()[-1])


def test_values_reach_the_command_and_do_not_leak_into_the_next_run():
    flags, seen = make_flags(), []

    def main(words):
        seen.append((flags["model"].value, flags["batch_size"].value, flags["kernel"].value))
        return 2

    assert run_toy(["--model=m", "--batch_size=8", "--kernel=a", "--kernel=b"], main, flags) == 2
    assert run_toy(["--model", "n"], main, flags) == 2
    assert seen == [("m", 8, ["a", "b"]), ("n", 4, [])]


def test_what_was_given_can_be_typed_again():
    flags, seen = make_flags(), []

    def main(words):
        seen.append(flags.given())
        return 0

    argv = ["--model=a b", "--batch_size=8", "--overwrite", "--kernel=a=b:c", "--kernel=d=e:f"]
    assert run_toy([*argv, "--level=0.5"], main, flags) == 0  # 0.5 is the default
    assert sorted(seen[0]) == sorted(argv)
    assert run_toy(seen[0], main, flags) == 0
    assert seen[1] == seen[0]
    command = shlex.split(flags.as_typed("batch_size", "kernel"))
    assert command[:2] == ["python", "-m"]
    assert sorted(command[3:]) == ["--model=a b", "--overwrite"]


def test_a_flag_given_twice_is_told(caplog):
    flags = make_flags()
    with caplog.at_level("WARNING", "kernjax"):
        assert run_toy(["--model=m", "--kernel=a", "--kernel=b"], flags=flags) == 0
        assert not caplog.messages  # that one may be repeated
        assert run_toy(["--model=m", "--model", "n"], flags=flags) == 0
    assert caplog.messages == ["--model is given 2 times: the last counts, n."]


def test_a_terminal_that_lacks_a_character_gets_an_escape(monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="latin-1"))

    def main(words):
        print("\u00b1 \u2026")
        return 0

    assert run_toy(["--model=m"], main) == 0
    assert raw.getvalue() == b"\xb1 \\u2026\n"


def test_two_commands_may_define_the_same_flag():
    assert run_toy(["--model=a"]) == run_toy(["--model=b"]) == 0


def test_flagfile(tmp_path):
    flags = make_flags()
    (tmp_path / "run.flags").write_text("# a comment\n--model=here\n--engine=transformers\n")
    assert run_toy([f"--flagfile={tmp_path}/run.flags"], flags=flags) == 0
    assert (flags["model"].value, flags["engine"].value) == ("here", "transformers")
    assert run_toy([f"--flagfile={tmp_path}/run.flags", "--model=there"], flags=flags) == 0
    assert flags["model"].value == "there"


def test_help_prints_the_manual_even_without_required_flags(capsys):
    assert run_toy(["--help"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("Judges a toy.\n\nThe manual of the toy.")
    assert "--model (required)" in out and "--batch_size (default: 4)" in out
    assert "--engine=jax|transformers (default: jax)" in out
    assert "--[no]overwrite" in out and "How:" in out and "--flagfile=FILE" in out
    assert not err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--model=m", "--batchsize=3"], "Unknown flag --batchsize. Did you mean --batch_size?"),
        (["--model=m", "--zzz"], "Unknown flag --zzz. Known: --batch_size, --debug_log"),
        (
            ["--model=m", "--batch_size=many"],
            "--batch_size='many' cannot be read. Expected a whole",
        ),
        (["--model=m", "--batch_size=0"], "Expected a whole number of at least 1."),
        (["--model=m", "--level=1.5"], "Expected a number from 0 to 1."),
        (["--model=m", "--engine=tf"], "Expected one of jax, transformers."),
        (["--model=m", "--overwrite=perhaps"], "Expected true or false."),
        (["--model=m", "--batch_size"], "--batch_size"),
        ([], "--model is missing."),
        (["--model="], "--model is missing."),
        (["--model=m", "--kernel=k", "--kernel= "], "--kernel is given without a value."),
        (["--model= "], "--model is given without a value."),
        (["--model=m", "stray"], "'stray' is not a flag."),
        (["--flagfile=/no/such/file"], "/no/such/file"),
    ],
)
def test_bad_command_lines_are_one_line_and_code_3(argv, message, capsys):
    assert run_toy(argv, main=lambda words: pytest.fail("ran")) == 3
    out, err = capsys.readouterr()
    assert message in err and err.startswith("kernjax.toy: ")
    assert err.count("\n") == 1 and "Traceback" not in err
    assert last_json(out) == {"exit_code": 3, "error": err.removeprefix("kernjax.toy: ").strip()}


def raiser(error):
    def main(words):
        raise error

    return main


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (UserError("Found x.", "Expected y.", "Do z."), "Found x. Expected y. Do z."),
        (
            KeyboardInterrupt(),
            "interrupted. A recording that was begun goes on with the same command.",
        ),
        (BrokenPipeError(32, "Broken pipe"), "the reader of the output went away"),
        (OSError(28, "No space left on device", "/x/rec"), "the disk is full (/x/rec)"),
        (ValueError("RESOURCE: No space left on device\nmore"), "the disk is full"),
        (PermissionError(13, "Permission denied", "/x"), "/x: Permission denied."),
        (MemoryError(), "out of memory"),
        (NotImplementedError("S=3 is not a multiple of 8."), "not supported: S=3"),
        (RuntimeError("first\nsecond"), "unexpected RuntimeError: first [test_command.py:"),
        (SystemExit("gone"), "gone"),
        (ExceptionGroup("all refused", [NotImplementedError("a"), UserError("b")]), "refused: not"),
    ],
)
def test_whatever_is_raised_becomes_code_3_without_traceback(error, message, capsys):
    def main(words):
        raise error

    previous = signal.getsignal(signal.SIGINT)
    try:
        assert run_toy(["--model=m"], main) == 3
    finally:
        signal.signal(signal.SIGINT, previous)
    err = capsys.readouterr().err
    assert message in err and "Traceback" not in err and err.count("\n") == 1


@pytest.mark.parametrize(("code", "expected"), [(None, 0), (0, 0), (1, 1), (2, 2), (9, 3), (-1, 3)])
def test_exit_codes(code, expected):
    assert run_toy(["--model=m"], lambda words: code) == expected
    assert run_toy(["--model=m"], raiser(SystemExit(code))) == expected


def test_debug_log_has_the_traceback(tmp_path, capsys):
    log = tmp_path / "log"
    argv = ["--model=m", f"--debug_log={log}"]
    assert run_toy(argv, raiser(RuntimeError("boom"))) == 3
    assert "Traceback" in log.read_text() and "boom" in log.read_text()
    assert f"(The traceback is in {log}.)" in capsys.readouterr().err
    argv = ["--model=m", "--debug_log=/no/such/folder/log"]
    assert run_toy(argv, raiser(RuntimeError("boom"))) == 3
    assert "could not be written" in capsys.readouterr().err


def test_json_line_takes_numpy_and_has_no_nan(capsys):
    command.print_json(
        {
            "kl": {"median": np.float32(0.5), "max": float("inf"), "rows": np.array([1.0, np.nan])},
            "ok": np.bool_(True),
            "path": Path("a/b"),
            "set": (1, 2),
        }
    )
    assert json.loads(capsys.readouterr().out) == {
        "kl": {"median": 0.5, "max": None, "rows": [1.0, None]},
        "ok": True,
        "path": "a/b",
        "set": [1, 2],
    }


def test_logs_go_to_standard_error(capsys):
    def main(words):
        command.log.info("segment 1 of 2")
        return 0

    assert run_toy(["--model=m"], main) == 0
    assert capsys.readouterr() == ("", "segment 1 of 2\n")


def python(code: str, stdout=subprocess.PIPE) -> subprocess.Popen:
    script = f"""
        import sys, time
        from kernjax.base import command
        FLAGS = command.Flags("toy", "A toy.")
        def main(words):
            {code}
        command.run(main, FLAGS)
    """
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)],
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )


def test_full_disk_on_standard_output():
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full here")
    with open("/dev/full", "w") as full:
        process = python('print("a verdict")', stdout=full)
        err = process.communicate(timeout=60)[1]
    assert process.returncode == 3
    assert "the disk is full" in err and err.count("\n") == 1


def test_closed_pipe():
    process = python('time.sleep(0.2); print("a verdict" * 100000)')
    process.stdout.close()
    err = process.stderr.read()
    process.stderr.close()
    assert process.wait(timeout=60) == 3
    assert "the reader of the output went away" in err and err.count("\n") == 1


def test_control_c():
    process = python('print("started", flush=True); time.sleep(50)')
    assert process.stdout.readline() == "started\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 3
    assert (
        err
        == "kernjax.toy: interrupted. A recording that was begun goes on with the same command.\n"
    )
    assert last_json(out)["exit_code"] == 3


def test_control_c_does_not_wait_for_what_still_runs():
    """A compiler's thread, say, of which Python would wait for the end."""
    process = python(
        "import threading; threading.Thread(target=time.sleep, args=(50,)).start();"
        ' print("started", flush=True); time.sleep(50)'
    )
    assert process.stdout.readline() == "started\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert (
        process.returncode == 3
        and err
        == "kernjax.toy: interrupted. A recording that was begun goes on with the same command.\n"
    )
    assert last_json(out)["exit_code"] == 3


def test_commands_are_read_from_the_tree():
    table = entry.commands()
    assert "corpus" in table and not any(name.startswith("_") for name in table)
    assert all(summary.endswith(".") for summary in table.values()), table


def test_dispatch_lists_and_refuses(capsys):
    assert entry.dispatch([]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in entry.commands())
    with pytest.raises(UserError, match="Did you mean 'corpus'"):
        entry.dispatch(["corpsu"])
    with pytest.raises(UserError, match="Known: .*corpus"):
        entry.dispatch(["zzzz"])


def test_console_script_runs_a_command():
    def kernjax(*argv):
        return subprocess.run(
            [sys.executable, "-m", "kernjax", *argv], capture_output=True, text=True, cwd=ROOT
        )

    done = kernjax("corpus", "--help")
    assert done.returncode == 0 and "kernjax.corpus" in done.stdout
    wrong = kernjax("corpsu")
    assert wrong.returncode == 3 and wrong.stderr.startswith("kernjax: There is no command")


def test_importing_a_command_loads_nothing_that_could_fail():
    # Outside `main` an ImportError would end with Python's exit code 1, which means FAIL.
    names = [f"kernjax.{name}" for name in entry.commands()]
    code = (
        "import importlib, sys\n"
        f"for name in {names!r}: importlib.import_module(name)\n"
        "print([m for m in ('jax', 'flax', 'tensorstore', 'tokenizers', 'torch') "
        "if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[]\n"
