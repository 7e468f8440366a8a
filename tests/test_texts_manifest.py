"""Manifests and loading: every way to say what a segment is, and every way to get it wrong."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
from texts_helpers import byte_tokenizer, make_corpus, make_segment

from kernjax.base.errors import UserError
from kernjax.texts import (
    Corpus,
    find_manifest,
    known_corpora,
    load_corpus,
    load_tokenizer,
    read_manifest,
    write_corpus,
)

SEGMENT = """
[[segment]]
id = "a"
kind = "prose"
context_len = 8
score_len = 4
"""
CUT = """
[[cut]]
kind = "prose"
context_len = 8
score_len = 4
count = 2
"""


def manifest(directory: Path, text: str, *, name: str = 'name = "mine"\n') -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "mine.toml"
    path.write_text(name + text)
    return path


def write_ids(directory: Path, count=13, dtype=np.int32, name="ids.npy") -> np.ndarray:
    directory.mkdir(parents=True, exist_ok=True)
    ids = np.arange(count).astype(dtype)
    np.save(directory / name, ids)
    return ids


def test_ids_from_npy_as_the_design_says(tmp_path):
    ids = write_ids(tmp_path)
    path = manifest(tmp_path, SEGMENT + 'tokens = "ids.npy"\ndocuments = [0, 5]\n')
    corpus = load_corpus(path, vocab_size=13)
    (segment,) = corpus.segments
    assert segment.tokens.tolist() == ids.tolist()
    assert (segment.id, segment.kind, segment.context_len, segment.score_len) == (
        "a",
        "prose",
        8,
        4,
    )
    assert segment.documents == (0, 5) and corpus.name == "mine"
    assert corpus.tokenizer_sha256 is None


def test_ids_from_an_archive_and_a_directory(tmp_path):
    np.savez(tmp_path / "ids.npz", one=np.arange(13, dtype=np.uint16))
    manifest(tmp_path, SEGMENT + 'tokens = "ids.npz#one"\n')
    assert load_corpus(tmp_path).segments[0].tokens.tolist() == list(range(13))


def test_a_written_corpus_is_read_back_and_is_the_same_bytes(tmp_path):
    segments = [make_segment("file", seed=1), make_segment("b", "code", 30, 0, 2, documents=(0, 9))]
    corpus = Corpus.build("two", segments, "a" * 64)
    first = write_corpus(corpus, tmp_path / "x", description='of "two"\tthings')
    second = write_corpus(corpus, tmp_path / "y", description='of "two"\tthings')
    for name in ("two.toml", "two.npz"):
        assert (first.parent / name).read_bytes() == (second.parent / name).read_bytes()
    assert sorted(path.name for path in first.parent.iterdir()) == ["two.npz", "two.toml"]
    read = load_corpus(first.parent)
    assert (read.name, read.sha256, read.tokenizer_sha256) == ("two", corpus.sha256, "a" * 64)
    assert [s.to_dict() for s in read.segments] == [s.to_dict() for s in segments]
    assert read_manifest(first).description == 'of "two"\tthings'


@pytest.mark.parametrize(("largest", "dtype"), [(65535, np.uint16), (65536, np.int32)])
def test_small_ids_are_stored_small(tmp_path, largest, dtype):
    tokens = np.array([0, 1, largest], np.int32)
    corpus = Corpus.build("x", [make_segment("b"), make_segment("a", context_len=1, score_len=1)])
    segment = type(corpus.segments[0])("c", "prose", 1, 1, tokens)
    path = write_corpus(Corpus.build("x", [segment]), tmp_path)
    with np.load(path.with_suffix(".npz")) as archive:
        assert archive["c"].dtype == dtype
    assert load_corpus(path).segments[0].tokens.tolist() == tokens.tolist()


def test_nothing_is_overwritten_unasked_or_left_half_written(tmp_path, monkeypatch):
    path = write_corpus(make_corpus(), tmp_path)
    before = path.read_bytes()
    other = make_corpus(3)
    with pytest.raises(UserError, match="exists. --overwrite"):
        write_corpus(other, tmp_path)
    assert path.read_bytes() == before
    write_corpus(other, tmp_path, overwrite=True)
    assert load_corpus(path).sha256 == other.sha256

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("numpy.lib.format.write_array", full)
    with pytest.raises(OSError):
        write_corpus(make_corpus(), tmp_path, overwrite=True)
    assert not path.exists() and not list(tmp_path.glob("*.part"))
    with pytest.raises(UserError, match="cannot be a file's"):
        write_corpus(Corpus.build("a/b", make_corpus().segments), tmp_path)


def test_a_text_is_tokenised_from_its_offset(tmp_path):
    model = byte_tokenizer(tmp_path / "model", merges=(("t", "h"), ("th", "e")))
    (tmp_path / "story.txt").write_bytes("\ufeffOnce\r\nupon the time there was a text.".encode())
    path = manifest(tmp_path, SEGMENT + 'source = "story.txt"\noffset = 5\n')
    corpus = load_corpus(path, model)
    tokenizer = load_tokenizer(model)
    assert tokenizer.decode(corpus.segments[0].tokens) == "upon the time the"
    assert corpus.tokenizer_sha256 == tokenizer.sha256
    assert tokenizer.sha256 == hashlib.sha256((model / "tokenizer.json").read_bytes()).hexdigest()
    by_file = load_corpus(path, model / "tokenizer.json")
    assert by_file.sha256 == load_corpus(path, tokenizer).sha256 == corpus.sha256


def test_the_start_of_a_long_text_is_tokenised_like_the_whole(tmp_path):
    tokenizer = load_tokenizer(byte_tokenizer(tmp_path, merges=(("t", "h"), ("th", "e"))))
    text = "the ends of the thé\n" * 2000
    whole = tokenizer.encode(text)
    for count in (1, 2, 500, 5000, len(whole)):
        ids, chars = tokenizer.encode_start(text, count)
        assert ids.tolist() == whole[:count].tolist()
        assert tokenizer.encode(text[:chars]).tolist()[: count - 1] == ids.tolist()[:-1]
    ids, chars = tokenizer.encode_start(text, len(whole) + 1)
    assert len(ids) == len(whole) and chars == len(text)
    assert tokenizer.encode_start("", 3)[0].tolist() == []


def test_texts_and_ids_may_stand_in_one_manifest(tmp_path):
    model = byte_tokenizer(tmp_path / "model")
    write_ids(tmp_path)
    (tmp_path / "t").write_text("A text of some length.")
    text = SEGMENT + 'tokens = "ids.npy"\n' + SEGMENT.replace('"a"', '"b"') + 'source = "t"\n'
    assert [s.id for s in load_corpus(manifest(tmp_path, text), model).segments] == ["a", "b"]


def test_a_pinned_address_is_read_from_the_cache(tmp_path):
    model = byte_tokenizer(tmp_path / "model")
    data = b"A text from somewhere else."
    digest = hashlib.sha256(data).hexdigest()
    path = manifest(tmp_path, SEGMENT + f'source = "https://h.invalid/t"\nsha256 = "{digest}"\n')
    with pytest.raises(UserError, match="1 of 1 sources are not on this machine"):
        load_corpus(path, model, cache_dir=tmp_path / "cache")
    (source,) = read_manifest(path).public_sources()
    target = tmp_path / "cache" / source.key
    target.parent.mkdir(parents=True)
    target.write_bytes(data)
    corpus = load_corpus(path, model, cache_dir=tmp_path / "cache")
    assert load_corpus(path, model, mirror=tmp_path / "cache").sha256 == corpus.sha256


def table_corpus(tmp_path: Path) -> Path:
    rows, mirror = [], tmp_path / "mirror"
    for kind, group in (("prose", "a"), ("prose", "b"), ("code", "c")):
        data = "".join(f"{kind} {group} {line}, " for line in range(30)).encode()
        target = mirror / group / "r1" / "x.txt"
        target.parent.mkdir(parents=True)
        target.write_bytes(data)
        digest = hashlib.sha256(data).hexdigest()
        rows.append(f"{kind}\t{group}\tr1\tx.txt\t{len(data)}\t{digest}\n")
    header = "kind\trepository\trevision\tpath\tbytes\tsha256\n"
    (tmp_path / "s.tsv").write_text(header + "".join(rows))
    sources = (
        '[sources]\ntable = "s.tsv"\naddress = "https://h.invalid/{repository}/{revision}/{path}"\n'
    )
    return manifest(tmp_path, sources + CUT + CUT.replace("prose", "code"))


def test_segments_are_cut_from_a_table_of_sources(tmp_path):
    path, model = table_corpus(tmp_path), byte_tokenizer(tmp_path / "model")
    corpus = load_corpus(path, model, mirror=tmp_path / "mirror")
    assert [s.id for s in corpus.segments] == ["prose-8-00", "prose-8-01", "code-8-00", "code-8-01"]
    assert read_manifest(path).strata() == {("code", 8): (2, 26), ("prose", 8): (2, 26)}
    tokenizer = load_tokenizer(model)
    texts = [tokenizer.decode(segment.tokens) for segment in corpus.segments]
    assert "prose a" in texts[0] and "prose b" in texts[1]
    assert all("code c" in text and "prose" not in text for text in texts[2:])
    assert load_corpus(path, model, mirror=tmp_path / "mirror").sha256 == corpus.sha256


def test_this_python_is_a_corpus(tmp_path):
    path = manifest(tmp_path, "[sources]\npython = true\n" + CUT + CUT.replace("prose", "code"))
    model = byte_tokenizer(tmp_path / "model")
    corpus = load_corpus(path, model, vocab_size=256)
    assert {s.kind for s in corpus.segments} == {"prose", "code"}
    assert load_corpus(path, model).sha256 == corpus.sha256
    path = manifest(tmp_path, "[sources]\npython = true\n" + CUT.replace("prose", "verse"))
    with pytest.raises(UserError, match="Python has prose and code only"):
        load_corpus(path, model)


def test_the_bundled_local_corpus_fits_this_python(tmp_path):
    # About five characters a token, more than a real tokenizer reaches on this text.
    from kernjax.texts.python_library import prose_documents

    cuts = read_manifest(known_corpora()["local"]).cuts
    needed = sum(cut.count * cut.length for cut in cuts if cut.kind == "prose")
    assert sum(map(len, prose_documents())) > 5 * needed


def test_known_names():
    assert {"local", "article"} <= set(known_corpora())
    for name, path in known_corpora().items():
        assert read_manifest(path).name == name
    with pytest.raises(UserError, match="no corpus 'lokal'. Known: .*Did you mean 'local'"):
        find_manifest("lokal")


def test_a_directory_must_have_one_manifest(tmp_path):
    with pytest.raises(UserError, match="holds 0 manifests"):
        load_corpus(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("= 3", "is not TOML"),
        ("", "has 0 .*segment"),
        (SEGMENT, "has neither tokens nor source"),
        (SEGMENT + 'tokens = "i"\nsource = "s"\n', "has both tokens and source"),
        (SEGMENT + 'token = "i"\n', "has neither tokens nor source"),
        (SEGMENT + 'tokens = "ids.npy"\nofset = 3\n', "unknown key 'ofset'"),
        (SEGMENT + 'source = "s"\nofset = 3\n', "unknown key 'ofset'. Did you mean 'offset'"),
        (SEGMENT.replace('kind = "prose"\n', "") + 'tokens = "i"\n', "segment 'a' has no kind"),
        (SEGMENT.replace("= 8", '= "8"') + 'tokens = "i"\n', "context_len='8'"),
        (SEGMENT.replace("= 8", "= 0") + 'tokens = "i"\n', "context_len=0"),
        (SEGMENT.replace("= 4", "= -1") + 'tokens = "i"\n', "score_len=-1"),
        (SEGMENT.replace('"a"', "1") + 'tokens = "i"\n', "id=1. Expected text"),
        (SEGMENT + "tokens = 3\n", "tokens=3. Expected text"),
        (SEGMENT + 'tokens = "ids.npy"\ndocuments = 0\n', "documents=0. Expected a list"),
        (SEGMENT + 'source = "s"\noffset = -1\n', "offset=-1"),
        (SEGMENT + 'source = "s"\nsha256 = "abc"\n', "Expected 64 hexadecimal digits"),
        (SEGMENT + 'source = "https://h.invalid/x"\n', "has no sha256"),
        ("segment = 3\n", "is no list of tables"),
        (CUT, "1 ..cut.. and no .sources."),
        (SEGMENT + 'tokens = "i"\n' + CUT + "[sources]\npython = true\n", "Expected either"),
        (CUT + "[sources]\npython = false\n", "python=False"),
        (CUT + '[sources]\ntable = "x"\n', "sources has no address"),
        (CUT + "[sources]\npython = true\ntable = 1\n", "unknown key 'table'"),
        (CUT.replace("= 2", "= 0") + "[sources]\npython = true\n", "count=0"),
        (CUT + "colour = 3\n[sources]\npython = true\n", "unknown key 'colour'"),
        ("sha256 = 3\n" + SEGMENT, "sha256=3. Expected text"),
        ('tokenizer_sha256 = "xyz"\n' + SEGMENT, "64 hexadecimal digits"),
        ("segments = 3\n" + SEGMENT, "unknown key 'segments'. Did you mean 'segment'"),
    ],
)
def test_a_wrong_manifest_is_refused(tmp_path, text, message):
    with pytest.raises(UserError, match=message):
        read_manifest(manifest(tmp_path, text))


def test_a_manifest_without_a_name_or_readable_text(tmp_path):
    with pytest.raises(UserError, match="has no name"):
        read_manifest(manifest(tmp_path, SEGMENT, name=""))
    (tmp_path / "b.toml").write_bytes(b"name = '\xff'")
    with pytest.raises(UserError, match="is not TOML"):
        read_manifest(tmp_path / "b.toml")
    with pytest.raises(UserError, match="cannot be read"):
        read_manifest(tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("setup", "tokens", "message"),
    [
        (lambda d: None, "none.npy", "none.npy does not exist"),
        (lambda d: write_ids(d, dtype=np.int64), "ids.npy", "dtype int64"),
        (lambda d: write_ids(d, 12), "ids.npy", r"shape \[12\]. Expected \[13\]"),
        (lambda d: np.save(d / "ids.npy", np.zeros((13, 1), np.int32)), "ids.npy", "shape"),
        (lambda d: (d / "ids.npy").write_bytes(b"not numpy"), "ids.npy", "cannot be read"),
        (lambda d: (d / "ids.npz").write_bytes(b"PK\3\4 cut"), "ids.npz#a", "cannot be read"),
        (lambda d: np.save(d / "ids.npy", np.array([{}])), "ids.npy", "cannot be read"),
        (lambda d: np.savez(d / "ids.npz", b=np.zeros(13)), "ids.npz#a", "member 'a'. It holds b"),
        (lambda d: np.savez(d / "ids.npz", b=np.zeros(13)), "ids.npz", "Write the reference as"),
        (lambda d: write_ids(d), "ids.npy#a", "is one array, without member 'a'"),
    ],
)
def test_wrong_ids_are_refused(tmp_path, setup, tokens, message):
    setup(tmp_path)
    with pytest.raises(UserError, match=message) as caught:
        load_corpus(manifest(tmp_path, SEGMENT + f'tokens = "{tokens}"\n'))
    assert "'a'" in str(caught.value)


def test_ids_outside_the_vocabulary(tmp_path):
    write_ids(tmp_path)
    path = manifest(tmp_path, SEGMENT + 'tokens = "ids.npy"\n')
    with pytest.raises(UserError, match="token id 12 at index 12 .*below 12"):
        load_corpus(path, vocab_size=12)


def test_hashes_that_do_not_match(tmp_path):
    write_ids(tmp_path)
    text = SEGMENT + 'tokens = "ids.npy"\n'
    with pytest.raises(UserError, match=f"Expected {'0' * 64}, which .*mine.toml names"):
        load_corpus(manifest(tmp_path, f'sha256 = "{"0" * 64}"\n' + text))
    model = byte_tokenizer(tmp_path / "model")
    path = manifest(tmp_path, f'tokenizer_sha256 = "{"0" * 64}"\n' + text)
    assert load_corpus(path).tokenizer_sha256 == "0" * 64
    assert load_corpus(path, tmp_path).tokenizer_sha256 == "0" * 64  # no tokenizer there
    for tokenizer in (model, model / "tokenizer.json", load_tokenizer(model)):
        with pytest.raises(UserError, match="its ids mean other words"):
            load_corpus(path, tokenizer)
    (tmp_path / "s").write_text("A text of some length.")
    pinned = SEGMENT + f'source = "s"\nsha256 = "{"0" * 64}"\n'
    with pytest.raises(UserError, match="s has sha256 .*The file was changed"):
        load_corpus(manifest(tmp_path, pinned), model)


def test_texts_need_a_tokenizer(tmp_path):
    (tmp_path / "s").write_text("A text of some length.")
    path = manifest(tmp_path, SEGMENT + 'source = "s"\n')
    with pytest.raises(UserError, match="is made of texts"):
        load_corpus(path)
    with pytest.raises(UserError, match="has no tokenizer.json"):
        load_corpus(path, tmp_path)
    with pytest.raises(UserError, match="none.json does not exist"):
        load_corpus(path, tmp_path / "none.json")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="cannot be read as a tokenizer"):
        load_corpus(path, tmp_path)


def test_a_text_that_is_short_or_missing(tmp_path):
    model = byte_tokenizer(tmp_path / "model")
    (tmp_path / "s").write_text("twelve bytes")
    path = manifest(tmp_path, SEGMENT + 'source = "s"\n')
    with pytest.raises(UserError, match="s has 12 tokens from character 0 on. Expected 13"):
        load_corpus(path, model)
    (tmp_path / "s").unlink()
    with pytest.raises(UserError, match="s does not exist"):
        load_corpus(path, model)


def test_overlapping_cuts_are_refused(tmp_path):
    model = byte_tokenizer(tmp_path / "model")
    (tmp_path / "s").write_text("Forty characters of one text, more or less it is.")

    def two(offset):
        second = SEGMENT.replace('"a"', '"b"') + f'source = "s"\noffset = {offset}\n'
        return manifest(tmp_path, SEGMENT + 'source = "s"\noffset = 3\n' + second)

    assert len(load_corpus(two(16), model).segments) == 2
    for offset in (15, 3, 0):
        with pytest.raises(UserError, match="'a' and 'b' overlap in s .characters 3 to 16"):
            load_corpus(two(offset), model)
