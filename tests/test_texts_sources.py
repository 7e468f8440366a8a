"""Sources: the table, mirrors, cleaning, this machine's Python."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import pytest

from kernjax.base.errors import UserError
from kernjax.base.resources import data_dir
from kernjax.texts import Mirror, Source, default_cache_dir, locate, read_manifest, read_text
from kernjax.texts.python_library import code_documents, prose_documents
from kernjax.texts.sources import cut_book, read_table

HEADER = "kind\trepository\trevision\tpath\tbytes\tsha256\n"
ADDRESS = "https://host.invalid/{repository}/{revision}/{path}"


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def write_table(path: Path, files: dict[str, bytes]) -> Path:
    rows = [
        f"prose\towner/repo\tr1\t{name}\t{len(data)}\t{sha256(data)}\n"
        for name, data in files.items()
    ]
    path.write_text(HEADER + "".join(rows))
    return path


def test_the_table_becomes_sources(tmp_path):
    table = write_table(tmp_path / "t.tsv", {"a/b.txt": b"hello"})
    assert read_table(table, ADDRESS) == [
        Source(
            "https://host.invalid/owner/repo/r1/a/b.txt",
            sha256(b"hello"),
            "owner/repo/r1/a/b.txt",
            "prose",
            "owner/repo",
            5,
        )
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "lists no source"),
        (HEADER, "lists no source"),
        ("kind\tpath\nprose\tx\n", "has no column repository, revision, bytes, sha256"),
        (HEADER + "prose\to/r\tr1\tx\t5\n", "line 2 has an empty field"),
        (HEADER + f"prose\to/r\tr1\tx\tfive\t{'a' * 64}\n", "line 2: bytes='five'"),
        (HEADER + "prose\to/r\tr1\tx\t5\tabc\n", "sha256='abc'"),
        (HEADER + f"prose\to/r\tr1\t../../x\t5\t{'a' * 64}\n", "leaves its directory"),
    ],
)
def test_a_wrong_table_is_refused(tmp_path, text, message):
    (tmp_path / "t.tsv").write_text(text)
    with pytest.raises(UserError, match=message):
        read_table(tmp_path / "t.tsv", ADDRESS)


def test_a_wrong_template_and_a_missing_table_are_refused(tmp_path):
    table = write_table(tmp_path / "t.tsv", {"x": b"1"})
    for template in ("https://h/{repo}", "https://h/{}", "https://h/{"):
        with pytest.raises(UserError, match="cannot be filled in"):
            read_table(table, template)
    with pytest.raises(UserError, match="cannot be read"):
        read_table(tmp_path / "none.tsv", ADDRESS)


def test_the_bundled_table_is_whole():
    manifest = read_manifest(data_dir("corpora") / "article.toml")
    sources = manifest.public_sources()
    groups = {kind: {s.group for s in sources if s.kind == kind} for kind in ("prose", "code")}
    assert len(groups["prose"]) == 8
    assert groups["code"] == {
        "python/cpython",
        "flashinfer-ai/flashinfer",
        "tokio-rs/tokio",
        "fla-org/flash-linear-attention",
    }
    assert len({source.sha256 for source in sources}) == len(sources)
    assert {(kind, depth): count for (kind, depth), (count, _) in manifest.strata().items()} == {
        (kind, depth): 2
        for kind in ("prose", "code")
        for depth in (2048, 8192, 32768, 65536, 131072)
    }
    # Room for the cuts even at five bytes a token.
    for kind in ("prose", "code"):
        needed = sum(cut.count * cut.length for cut in manifest.cuts if cut.kind == kind)
        assert sum(source.size for source in sources if source.kind == kind) > 4 * needed


def test_mirror_finds_by_place_or_by_content(tmp_path):
    (table,) = read_table(write_table(tmp_path / "t.tsv", {"b.txt": b"hello"}), ADDRESS)
    placed = tmp_path / "placed" / table.key
    placed.parent.mkdir(parents=True)
    placed.write_bytes(b"hello")
    flat = tmp_path / "flat" / "deep"
    flat.mkdir(parents=True)
    (flat / "another-name").write_bytes(b"hello")
    (flat / "same-size").write_bytes(b"hallo")
    assert Mirror(tmp_path / "placed").find(table) == placed
    assert Mirror(tmp_path / "flat").find(table) == flat / "another-name"
    unsized = Source(table.address, table.sha256, table.key)
    assert Mirror(tmp_path / "flat").find(unsized) == flat / "another-name"
    placed.write_bytes(b"hallo")
    assert Mirror(tmp_path / "placed").find(table) is None
    with pytest.raises(UserError, match="is not a directory"):
        Mirror(tmp_path / "nowhere")


def test_locate_counts_what_is_missing(tmp_path):
    table = write_table(tmp_path / "t.tsv", {"a": b"one", "b": b"two", "c": b"three"})
    a, b, c = read_table(table, ADDRESS)
    for directory, source, data in (("cache", a, b"one"), ("mirror", b, b"two")):
        path = tmp_path / directory / source.key
        path.parent.mkdir(parents=True)
        path.write_bytes(data)
    cache, mirror = tmp_path / "cache", Mirror(tmp_path / "mirror")
    assert locate([a, b], cache, mirror, "x") == {a: cache / a.key, b: tmp_path / "mirror" / b.key}
    with pytest.raises(UserError, match="2 of 3 sources are not .*fetch --corpus=x"):
        locate([a, b, c], cache, None, "x")
    (cache / a.key).write_bytes(b"One")
    with pytest.raises(UserError, match="1 of 1 sources"):
        locate([a], cache, None, "x")


def test_cache_dir_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("KERNJAX_CACHE_DIR", raising=False)
    assert default_cache_dir() == tmp_path / "kernjax"
    monkeypatch.setenv("KERNJAX_CACHE_DIR", str(tmp_path / "mine"))
    assert default_cache_dir() == tmp_path / "mine"


def test_texts_are_cleaned(tmp_path):
    path = tmp_path / "t"
    path.write_bytes("\ufeffone\r\ntwo\rthrée\n".encode())
    assert read_text(path) == "one\ntwo\nthrée\n"
    path.write_bytes(b"caf\xe9")
    with pytest.raises(UserError, match="is not UTF-8 text .byte 3."):
        read_text(path)


@pytest.mark.parametrize(
    ("start", "end"),
    [
        ("*** START OF THIS PROJECT GUTENBERG EBOOK X ***", "*** END OF THIS PROJECT GUTENBERG"),
        ("***START OF THE PROJECT GUTENBERG EBOOK X***", "***END OF THE PROJECT GUTENBERG EBOOK"),
        ("*** START OF THE PROJECT GUTENBERG EBOOK X ***", "End of the Project Gutenberg EBook"),
        ("*** START OF THE PROJECT GUTENBERG EBOOK X ***", "End of Project Gutenberg's X"),
    ],
)
def test_a_book_is_cut_out_of_its_licence(start, end):
    book = f"Title\nlicence\n{start}\n\n\nIt was late.\n\nThe end.\n\n\n{end}\nmore licence\n"
    assert cut_book(book) == "It was late.\n\nThe end.\n"
    with pytest.raises(UserError, match="no END line"):
        cut_book(f"{start}\nIt was")


def test_other_texts_are_left_alone():
    code = "print('*** START OF it')  # *** END OF\n\n"
    assert cut_book(code) == code


@pytest.mark.parametrize("name", ["dracula", "war-and-peace", "the-brothers-karamazov"])
def test_real_books_lose_nothing_but_the_licence(name):
    books = Path(__file__).resolve().parent.parent.parent / "shared" / "corpora" / "books"
    if not (books / f"{name}.txt").is_file():
        pytest.skip("the books are not on this machine")
    whole, book = (books / f"{name}.txt").read_bytes(), read_text(books / f"{name}.txt")
    assert len(book) > 0.95 * len(whole.decode("utf-8-sig").replace("\r\n", "\n")) - 20_000
    assert "START OF TH" not in book and "END OF TH" not in book
    assert "PROJECT GUTENBERG LICENSE" not in book and "\r" not in book


def test_this_python_as_text():
    few, more = code_documents(20_000), code_documents(60_000)
    assert more[: len(few)] == few and len(more) > len(few)
    assert sum(map(len, few)) >= 20_000 and all(len(text) > 1000 for text in few)
    prose = prose_documents()
    assert sum(map(len, prose)) > 300_000
    paragraphs = [p for text in prose for p in text.strip("\n").split("\n\n")]
    assert len(set(paragraphs)) == len(paragraphs)


def test_a_python_without_its_library_is_refused(monkeypatch, tmp_path):
    import sys

    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(UserError, match="holds no Python source"):
        code_documents(1000)
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(UserError, match="comes without pydoc_data"):
        prose_documents()


def test_generated_tables_and_tests_are_left_out(monkeypatch, tmp_path):
    good = "x = 1\n" * 500
    for name in ("good.py", "pkg/good.py", "test/skipped.py", "pkg/tests/skipped.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(good)
    (tmp_path / "tiny.py").write_text("x = 1\n")
    (tmp_path / "table.py").write_text(good + f"T = {'9' * 500}\n")
    (tmp_path / "huge.py").write_text(good * 200)
    (tmp_path / "latin.py").write_bytes(good.encode() + b"# caf\xe9\n")
    (tmp_path / "_sysconfigdata_x.py").write_text(good)
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(tmp_path)})
    assert code_documents(10**9) == [good, good]
    shutil.rmtree(tmp_path / "pkg")
    assert code_documents(10**9) == [good]
