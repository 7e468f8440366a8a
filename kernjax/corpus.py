"""Turns texts into token segments: lists, fetches, builds, vets and samples corpora.

  python -m kernjax.corpus list
  python -m kernjax.corpus fetch  --corpus=article [--mirror=DIR]
  python -m kernjax.corpus build  --corpus=article --model=DIR --out=DIR
  python -m kernjax.corpus vet    --corpus=demo [--recording=DIR] [--model=DIR]
  python -m kernjax.corpus sample --model=DIR --prompts=FILE.jsonl --context_len=2048 --out=DIR

A corpus is a set of segments. Of each, `context_len` tokens are prefilled and `score_len` decoded
one by one on fixed tokens (teacher forcing). --corpus is a known name or the path of a manifest
(TOML; `kernjax/texts/manifest.py` describes it).

list    the known corpora: segments by kind and depth, tokens, sha256 (of ids and layout; that of
        a corpus of texts depends on the tokenizer, so it has none until it is built).
fetch   brings the public sources of a corpus into the cache: resumed where a run stopped, verified
        by sha256. --mirror takes them from a directory instead, laid out as
        repository/revision/path or in any way (then they are known by size and sha256).
build   tokenises the texts with the model's tokenizer.json and writes NAME.toml and NAME.npz,
        which `kernjax.record --corpus=OUT` takes. The same texts give the same bytes.
vet     whether a corpus can carry a verdict: independent segments, text that does not loop, and
        from a recording: mass outside the top 20, margins, near ties, missing decode steps.
sample  makes a corpus of a model's own outputs: each prompt (JSONL with `prompt`, `question`,
        `text` or `tokens`) is continued by sampling until the segment is full.

The results go to standard output, the last line is one JSON object. Exit codes: 0 done (vet:
nothing to remark) · 2 vet: usable with the reservations it names · 3 refused, or could not be done.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernjax.base import command
from kernjax.base.errors import UserError
from kernjax.base.resources import model_directory

if TYPE_CHECKING:
    from kernjax import texts

FLAGS = command.Flags("corpus", __doc__, positional="ACTION")
_CORPUS = FLAGS.string("corpus", None, "A known name, a manifest, or a directory with one.")
_MODEL = FLAGS.string(
    "model", None, "Model directory (or `demo`): its tokenizer.json; for sample, the model itself."
)
_OUT = FLAGS.string("out", None, "Directory to write the corpus to (build, sample).")
_NAME = FLAGS.string("name", None, "Name of the written corpus. build: default is the corpus's.")
_OVERWRITE = FLAGS.boolean("overwrite", False, "Replaces a corpus that is there already.")
FLAGS.heading("Sources of texts")
_CACHE_DIR = FLAGS.string(
    "cache_dir", None, "Fetched files. Default: $KERNJAX_CACHE_DIR or the user's cache directory."
)
_MIRROR = FLAGS.string("mirror", None, "Directory to take sources from instead of the network.")
FLAGS.heading("vet")
_RECORDING = FLAGS.string("recording", None, "A reference recording made on the corpus.")
FLAGS.heading("sample")
_PROMPTS = FLAGS.string("prompts", None, "JSONL file, one prompt a line.")
_KIND = FLAGS.string("kind", "sampled", "Kind of segments whose prompt names none.")
_TEMPLATE = FLAGS.string("template", "{prompt}", "Text around each prompt (a chat template).")
_LIMIT = FLAGS.integer("limit", None, "Use only the first prompts.", lower_bound=1)
_CONTEXT_LEN = FLAGS.integer("context_len", None, "Tokens to prefill.", lower_bound=1)
_SCORE_LEN = FLAGS.integer("score_len", 128, "Tokens to decode.", lower_bound=0)
_TEMPERATURE = FLAGS.number("temperature", 1.0, "0 is greedy.", lower_bound=0.0)
_SEED = FLAGS.integer("seed", 0, "Of the sampling.", lower_bound=0)
_BATCH_SIZE = FLAGS.integer("batch_size", 8, "Segments sampled at a time.", lower_bound=1)

_SOURCES = ("cache_dir", "mirror")
# Action -> (flags it needs, flags it also takes).
_ACTIONS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "list": ((), ("corpus", *_SOURCES)),
    "fetch": (("corpus",), _SOURCES),
    "build": (("corpus", "model", "out"), ("name", "overwrite", *_SOURCES)),
    "vet": (("corpus",), ("model", "recording", *_SOURCES)),
    "sample": (
        ("model", "prompts", "context_len", "out"),
        (
            "name",
            "overwrite",
            "kind",
            "template",
            "limit",
            "score_len",
            "temperature",
            "seed",
            "batch_size",
        ),
    ),
}


def main(args: list[str]) -> int:
    """Runs the action that `args` names."""
    if len(args) != 1 or args[0] not in _ACTIONS:
        raise UserError(
            f"The action is {' '.join(args)!r}." if args else "No action is named.",
            f"Expected one of {', '.join(_ACTIONS)}.",
            "`python -m kernjax.corpus --help` prints the manual.",
        )
    _check_flags(args[0])
    return {"list": _list, "fetch": _fetch, "build": _build, "vet": _vet, "sample": _sample}[
        args[0]
    ]()


def _check_flags(action: str) -> None:
    needed, allowed = _ACTIONS[action]
    if missing := [f"--{name}" for name in needed if FLAGS[name].value in (None, "")]:
        raise UserError(
            f"{action} has no {' and no '.join(missing)}.",
            f"Expected {', '.join(f'--{name}' for name in needed)}.",
        )
    known = {name for flags in _ACTIONS.values() for group in flags for name in group}
    for name in sorted(known - {*needed, *allowed}):
        if FLAGS[name].present:
            takes = ", ".join(f"--{flag}" for flag in (*needed, *allowed))
            raise UserError(f"{action} does not use --{name}.", f"It takes {takes}.")


def _list() -> int:
    from kernjax import texts

    names = [_CORPUS.value] if _CORPUS.value else list(texts.known_corpora())
    cache_dir, mirror = _cache_dir(), _mirror()
    listed = []
    for name in names:
        manifest = texts.read_manifest(texts.find_manifest(name))
        sources = manifest.public_sources()
        sha256 = manifest.sha256
        if sha256 is None and not manifest.needs_tokenizer:
            sha256 = texts.load_corpus(name).sha256
        strata = [
            {"kind": kind, "context_len": depth, "segments": segments, "tokens": tokens}
            for (kind, depth), (segments, tokens) in manifest.strata().items()
        ]
        here = sum(_is_here(source, cache_dir, mirror) for source in sources)
        listed.append(
            {
                "name": manifest.name,
                "description": manifest.description,
                "sha256": sha256,
                "needs_tokenizer": manifest.needs_tokenizer,
                "strata": strata,
                "sources": len(sources),
                "sources_here": here,
            }
        )
    for entry in listed:
        _print_corpus(entry)
    command.print_json({"corpora": listed})
    return command.EXIT_PASS


def _is_here(source: texts.Source, cache_dir: Path, mirror: texts.Mirror | None) -> bool:
    # By name only: `fetch` is what verifies.
    return (cache_dir / source.key).is_file() or bool(mirror and mirror.find(source))


def _print_corpus(entry: dict[str, Any]) -> None:
    print(f"{entry['name']}: {entry['description']}".rstrip(": "))
    if entry["sha256"]:
        print(f"  token ids, sha256 {entry['sha256']}")
    else:
        print("  texts: needs a model's tokenizer")
    if entry["sources"]:
        print(f"  {entry['sources_here']} of {entry['sources']} public sources are here")
    print(f"  {'kind':<10}{'context':>9}{'segments':>10}{'tokens':>12}")
    for row in entry["strata"]:
        print(
            f"  {row['kind']:<10}{row['context_len']:>9}{row['segments']:>10}{row['tokens']:>12,}"
        )
    print()


def _fetch() -> int:
    from tqdm import tqdm

    from kernjax import texts

    manifest = texts.read_manifest(texts.find_manifest(_CORPUS.value))
    sources, cache_dir = manifest.public_sources(), _cache_dir()
    known_size = sum(source.size or 0 for source in sources)
    on_terminal = sys.stderr.isatty()
    finished = 0
    with tqdm(
        total=known_size or None,
        unit="B",
        unit_scale=True,
        desc=manifest.name,
        disable=not on_terminal,
        file=sys.stderr,
    ) as bar:

        def on_file(fetched: texts.Fetched) -> None:
            nonlocal finished
            finished += 1
            if not on_terminal:
                command.log.info(
                    "%d/%d %s (%s, %s bytes)",
                    finished,
                    len(sources),
                    fetched.source.key,
                    fetched.how,
                    f"{fetched.size:,}",
                )

        fetched = texts.fetch_all(sources, cache_dir, _mirror(), bar.update, on_file)
    counts = {
        how: sum(item.how == how for item in fetched) for how in ("network", "mirror", "present")
    }
    total = sum(item.size for item in fetched)
    print(
        f"{manifest.name}: {len(fetched)} files, {total:,} bytes, all as pinned ("
        + ", ".join(f"{count} {how}" for how, count in counts.items())
        + f") in {cache_dir}"
    )
    command.print_json(
        {
            "corpus": manifest.name,
            "files": len(fetched),
            "bytes": total,
            **counts,
            "cache_dir": cache_dir,
        }
    )
    return command.EXIT_PASS


def _build() -> int:
    from kernjax import texts

    tokenizer = texts.load_tokenizer(_model_dir())
    corpus = _load(tokenizer)
    corpus.check_vocabulary(tokenizer.vocab_size)
    corpus = dataclasses.replace(corpus, name=_NAME.value or corpus.name)
    return _write(corpus, f"Made of {_CORPUS.value} by kernjax.corpus build.")


def _vet() -> int:
    from kernjax import texts

    corpus = _load(_model_dir() if _MODEL.value else None)
    remarks = texts.vet_tokens(corpus)
    profiles: list[texts.Profile] = []
    if _RECORDING.value:
        from kernjax.recording import load_recording

        found, profiles = texts.vet_recording(corpus, load_recording(_RECORDING.value))
        remarks += found
    refused = any(remark.is_refusal for remark in remarks)
    word = "REFUSED" if refused else "RESERVATIONS" if remarks else "GOOD"
    count = len(corpus.segments)
    print(f"{word}: {corpus.name}, {count} segments, sha256 {corpus.sha256[:12]}")
    _print_profiles(profiles)
    for remark in remarks:
        print(f"  {'refused' if remark.is_refusal else 'note'}: {remark.text}")
    code = command.EXIT_PASS
    if remarks:
        code = command.EXIT_COULD_NOT_JUDGE if refused else command.EXIT_INCONCLUSIVE
    command.print_json(
        {
            "corpus": corpus.name,
            "sha256": corpus.sha256,
            "exit_code": code,
            "remarks": [vars(remark) for remark in remarks],
            "profiles": [vars(profile) for profile in profiles],
        }
    )
    return code


def _print_profiles(profiles: list[texts.Profile]) -> None:
    if profiles:
        print(
            f"  {'kind':<10}{'context':>8}{'rows':>8}{'other':>8}{'entropy':>9}"
            f"{'margin 25/50/75 %':>22}{'<0.1':>7}{'<1':>6}"
        )
    for profile in profiles:
        quartiles = " ".join(f"{value:.2f}" for value in profile.margin_quartiles)
        print(
            f"  {profile.kind:<10}{profile.context_len:>8}{profile.rows:>8}"
            f"{profile.other_mean:>8.3f}{profile.entropy_median:>9.3f}{quartiles:>22}"
            f"{profile.near_ties:>7.1%}{profile.undecided:>6.0%}"
        )


def _sample() -> int:
    from kernjax import texts

    model = _model_dir()
    has_tokenizer = (model / "tokenizer.json").is_file()
    tokenizer = texts.load_tokenizer(model) if has_tokenizer else None
    prompts = texts.read_prompts(
        _PROMPTS.value,
        tokenizer,
        kind=_KIND.value,
        template=_TEMPLATE.value,
        limit=_LIMIT.value,
    )
    texts.check_lengths(prompts, _CONTEXT_LEN.value)
    from kernjax.scoring.sampling import sample_segments

    segments = sample_segments(
        model,
        prompts,
        context_len=_CONTEXT_LEN.value,
        score_len=_SCORE_LEN.value,
        temperature=_TEMPERATURE.value,
        seed=_SEED.value,
        batch_size=_BATCH_SIZE.value,
    )
    sha256 = tokenizer.sha256 if tokenizer else None
    corpus = texts.Corpus.build(_NAME.value or "sampled", segments, sha256)
    return _write(
        corpus,
        f"Sampled by {model.name} at temperature {_TEMPERATURE.value:g}, seed {_SEED.value}.",
    )


def _write(corpus: texts.Corpus, description: str) -> int:
    from kernjax import texts

    path = texts.write_corpus(
        corpus, _OUT.value, description=description, overwrite=_OVERWRITE.value
    )
    tokens = sum(segment.length for segment in corpus.segments)
    print(f"{path}: {len(corpus.segments)} segments, {tokens:,} tokens, sha256 {corpus.sha256}")
    command.print_json(
        {
            "corpus": corpus.name,
            "manifest": path,
            "segments": len(corpus.segments),
            "tokens": tokens,
            "sha256": corpus.sha256,
            "tokenizer_sha256": corpus.tokenizer_sha256,
        }
    )
    return command.EXIT_PASS


def _load(tokenizer: Path | texts.Tokenizer | None) -> texts.Corpus:
    from kernjax import texts

    return texts.load_corpus(
        _CORPUS.value, tokenizer, cache_dir=_CACHE_DIR.value, mirror=_MIRROR.value
    )


def _model_dir() -> Path:
    path = model_directory(_MODEL.value)
    if not path.exists():
        raise UserError(f"--model={_MODEL.value} does not exist.", "Expected a model directory.")
    return path


def _cache_dir() -> Path:
    from kernjax.texts import default_cache_dir

    return Path(_CACHE_DIR.value) if _CACHE_DIR.value else default_cache_dir()


def _mirror() -> texts.Mirror | None:
    from kernjax.texts import Mirror

    return Mirror(_MIRROR.value) if _MIRROR.value else None


if __name__ == "__main__":
    command.run(main, FLAGS)
