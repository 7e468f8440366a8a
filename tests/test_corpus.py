"""The command kernjax.corpus, from the command line's words to the files."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest
from texts_helpers import byte_tokenizer, make_recording

from kernjax import corpus as module
from kernjax.base import command
from kernjax.texts import Segment, load_corpus

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def run(capsys):
    """Runs the command; returns exit code, standard output, standard error, the JSON line."""

    def run(*argv):
        code = command.execute(module.main, module.FLAGS, [str(word) for word in argv])
        out, err = capsys.readouterr()
        return types.SimpleNamespace(
            code=code, out=out, err=err, data=json.loads(out.splitlines()[-1])
        )

    return run


@pytest.fixture
def house(tmp_path):
    """A manifest over a table of two sources, a mirror with them, and a model's tokenizer."""
    rows = []
    for kind in ("prose", "code"):
        data = "".join(f"{kind} line {line}\n" for line in range(80)).encode()
        target = tmp_path / "mirror" / f"{kind}.txt"
        target.parent.mkdir(exist_ok=True)
        target.write_bytes(data)
        digest = hashlib.sha256(data).hexdigest()
        rows.append(f"{kind}\to/{kind}\tr1\tx.txt\t{len(data)}\t{digest}\n")
    header = "kind\trepository\trevision\tpath\tbytes\tsha256\n"
    (tmp_path / "s.tsv").write_text(header + "".join(rows))
    cuts = "".join(
        f'[[cut]]\nkind = "{kind}"\ncontext_len = 64\nscore_len = 32\ncount = 2\n'
        for kind in ("prose", "code")
    )
    (tmp_path / "pair.toml").write_text(
        'name = "pair"\n[sources]\ntable = "s.tsv"\n'
        'address = "http://127.0.0.1:9/{repository}/{revision}/{path}"\n' + cuts
    )
    byte_tokenizer(tmp_path / "model")
    return tmp_path


def build(run, house, **flags):
    words = [f"--{name}={value}" for name, value in flags.items()]
    return run(
        "build",
        f"--corpus={house}/pair.toml",
        f"--model={house}/model",
        f"--mirror={house}/mirror",
        f"--out={house}/out",
        *words,
    )


def test_list_shows_what_comes_with_kernjax(run):
    done = run("list")
    assert done.code == 0 and not done.err
    listed = {entry["name"]: entry for entry in done.data["corpora"]}
    assert listed["article"]["sources"] == 72 and listed["article"]["needs_tokenizer"]
    assert {
        "kind": "code",
        "context_len": 131072,
        "segments": 2,
        "tokens": 2 * (131072 + 512 + 1),
    } in listed["article"]["strata"]
    assert listed["local"]["sources"] == 0
    assert "local: This machine's Python" in done.out


def test_list_one_and_what_is_here(run, house):
    done = run("list", f"--corpus={house}/pair.toml", f"--cache_dir={house}/cache")
    assert done.data["corpora"][0]["sources_here"] == 0
    done = run("list", f"--corpus={house}/pair.toml", f"--mirror={house}/mirror")
    assert done.data["corpora"][0]["sources_here"] == 2
    built = build(run, house)
    done = run("list", f"--corpus={house}/out")
    assert done.data["corpora"][0]["sha256"] == built.data["sha256"] and "token ids" in done.out


def test_fetch_from_a_mirror_then_from_the_cache(run, house, monkeypatch):
    monkeypatch.setattr("kernjax.texts.fetching.time.sleep", lambda seconds: None)
    words = ("fetch", f"--corpus={house}/pair.toml", f"--cache_dir={house}/cache")
    done = run(*words, f"--mirror={house}/mirror")
    assert done.code == 0
    assert done.data == {
        "corpus": "pair",
        "files": 2,
        "bytes": sum(path.stat().st_size for path in (house / "mirror").iterdir()),
        "network": 0,
        "mirror": 2,
        "present": 0,
        "cache_dir": f"{house}/cache",
    }
    assert done.err.splitlines()[0].startswith("1/2 o/prose/r1/x.txt (mirror, ")
    again = run(*words)
    assert again.data["present"] == 2
    offline = run("fetch", f"--corpus={house}/pair.toml", f"--cache_dir={house}/cache2")
    assert offline.code == 3 and "could not be fetched" in offline.data["error"]


def test_a_corpus_of_this_machine_needs_no_fetching(run):
    done = run("fetch", "--corpus=local")
    assert done.code == 0 and done.data["files"] == 0


def test_build_makes_what_record_takes(run, house):
    done = build(run, house)
    assert done.code == 0
    assert done.data["segments"] == 4 and done.data["tokens"] == 4 * 97
    corpus = load_corpus(house / "out", house / "model", vocab_size=256)
    assert corpus.sha256 == done.data["sha256"]
    assert corpus.tokenizer_sha256 == done.data["tokenizer_sha256"]
    texts = load_corpus(house / "pair.toml", house / "model", mirror=house / "mirror")
    assert texts.sha256 == corpus.sha256
    again = build(run, house)
    assert again.code == 3 and "--overwrite" in again.data["error"]
    files = {path: path.read_bytes() for path in (house / "out").iterdir()}
    assert build(run, house, overwrite="true").code == 0
    assert files == {path: path.read_bytes() for path in (house / "out").iterdir()}
    assert build(run, house, name="other").data["corpus"] == "other"


def test_vet_says_what_it_holds_of_a_corpus(run, house, monkeypatch):
    build(run, house)
    done = run("vet", f"--corpus={house}/out")
    assert done.code == 2 and done.out.startswith("RESERVATIONS: pair, 4 segments")
    assert {remark["name"] for remark in done.data["remarks"]} == {"thin", "depths"}
    corpus = load_corpus(house / "out")
    recording = make_recording(corpus, vocab_size=256)
    opened = []
    monkeypatch.setattr(
        "kernjax.recording.load_recording", lambda path: opened.append(path) or recording
    )
    done = run("vet", f"--corpus={house}/out", "--recording=somewhere")
    assert opened == ["somewhere"]
    assert done.code == 2 and [p["rows"] for p in done.data["profiles"]] == [66, 66]
    recording.tail_logprob[3] = np.nan
    done = run("vet", f"--corpus={house}/out", "--recording=somewhere")
    assert done.code == 3 and done.out.startswith("REFUSED: ") and "not finite" in done.out
    assert done.data["exit_code"] == 3


def test_vet_of_texts_takes_the_model(run, house):
    words = ("vet", f"--corpus={house}/pair.toml", f"--mirror={house}/mirror")
    assert run(*words, f"--model={house}/model").code == 2
    assert "is made of texts" in run(*words).data["error"]


def sampler(monkeypatch, calls):
    def sample_segments(model, prompts, *, context_len, score_len, **settings):
        calls.append((model, prompts, settings))
        segments = []
        for index, prompt in enumerate(prompts):
            tokens = np.full(context_len + score_len + 1, index, np.int32)
            tokens[: len(prompt.ids)] = prompt.ids
            segments.append(Segment(prompt.id, prompt.kind, context_len, score_len, tokens))
        return segments

    stub = types.ModuleType("kernjax.scoring.sampling")
    stub.sample_segments = sample_segments
    monkeypatch.setitem(sys.modules, "kernjax.scoring.sampling", stub)


def test_sample_hands_prompts_to_the_model_and_writes_a_corpus(run, house, monkeypatch):
    calls = []
    sampler(monkeypatch, calls)
    prompts = house / "gsm8k.jsonl"
    lines = [json.dumps({"question": f"What is {n} + {n}?", "answer": "x"}) for n in range(3)]
    prompts.write_text("\n".join(lines))
    words = [
        "sample",
        f"--model={house}/model",
        f"--prompts={prompts}",
        "--template=Q: {prompt}",
        "--kind=math",
        "--context_len=40",
        "--score_len=8",
        "--temperature=0.7",
        "--seed=3",
        "--limit=2",
        f"--out={house}/sampled",
    ]
    done = run(*words)
    assert done.code == 0, done.err
    ((model, given, settings),) = calls
    assert model == house / "model" and [p.text for p in given][0] == "Q: What is 0 + 0?"
    assert settings == {"temperature": 0.7, "seed": 3, "batch_size": 8}
    corpus = load_corpus(house / "sampled", house / "model")
    assert [(s.id, s.kind, s.context_len) for s in corpus.segments] == [
        ("prompt-1", "math", 40),
        ("prompt-2", "math", 40),
    ]
    assert corpus.sha256 == done.data["sha256"]
    short = run(*words, "--context_len=4")
    assert short.code == 3 and "Expected at most context_len=4" in short.data["error"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "No action is named. Expected one of list, fetch, build, vet, sample."),
        (("lsit",), "The action is 'lsit'."),
        (("list", "vet"), "The action is 'list vet'."),
        (("fetch",), "fetch has no --corpus."),
        (("build", "--corpus=local"), "build has no --model and no --out."),
        (("fetch", "--corpus=none"), "There is no corpus 'none'. Known: "),
        (("list", "--seed=3"), "list does not use --seed. It takes --corpus, --cache_dir"),
        (("vet", "--corpus=local", "--out=x"), "vet does not use --out."),
        (("vet", "--corpus=local", "--model=/no/such"), "--model=/no/such does not exist."),
        (("list", "--mirror=/no/such"), "is not a directory"),
        (
            ("sample", "--model=m", "--prompts=p", "--context_len=0", "--out=o"),
            "Expected a whole number of at least 1.",
        ),
        (("sample", "--temperature=-1"), "Expected a number of at least 0."),
    ],
)
def test_wrong_words(run, words, message):
    done = run(*words)
    assert done.code == 3 and message in done.data["error"]
    assert done.err.count("\n") == 1 and "Traceback" not in done.err


def test_from_the_shell(house):
    def corpus(*argv):
        return subprocess.run(
            [sys.executable, "-m", "kernjax.corpus", *argv],
            capture_output=True,
            text=True,
            cwd=ROOT,
        )

    done = corpus(
        "build",
        f"--corpus={house}/pair.toml",
        f"--model={house}/model",
        f"--mirror={house}/mirror",
        f"--out={house}/out",
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["segments"] == 4
    assert corpus("vet", "--corpus=nothing").returncode == 3
