"""Writes a training run's last checkpoint as an HF directory, while the training may go on.

    python -m kernjax.demo.export --workdir=RUN --out=DIRECTORY

The directory holds what transformers and `--model` read: config.json, model.safetensors (bfloat16),
tokenizer.json, tokenizer_config.json, generation_config.json, and README.md, the model card with
the text, the held-out loss and the limits. The last line of standard output is one JSON object.
Exit codes: 0 written, 3 could not.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from kernjax.base import command
from kernjax.base.errors import UserError

FLAGS = command.Flags("demo.export", __doc__)
_WORKDIR = FLAGS.string("workdir", None, "Directory of a training run.", required=True)
_OUT = FLAGS.string("out", None, "Directory to write.", required=True)
_MEASURE = FLAGS.string("measurements", None, "JSON of `kernjax.demo.measure` for the card.")


def main(words: list[str]) -> int:
    if words:
        raise UserError(f"Unexpected arguments {words}.", "Expected flags only.")
    measured = json.loads(Path(_MEASURE.value).read_text()) if _MEASURE.value else None
    summary = export(Path(_WORKDIR.value), Path(_OUT.value), measured)
    command.print_json(summary)
    return command.EXIT_PASS


def export(workdir: Path, out: Path, measured: dict[str, Any] | None = None) -> dict[str, Any]:
    """The checkpoint of `workdir` as an HF directory `out`; what was written."""
    from kernjax.demo import checkpoint, net
    from kernjax.demo.tokenizer import END_OF_TEXT
    from kernjax.model import ModelConfig
    from kernjax.weights import save_hf

    try:
        raw = json.loads((workdir / "config.json").read_text())
        card = json.loads((workdir / "tokens" / "data.json").read_text())
        tokenizer = (workdir / "tokens" / "tokenizer.json").read_text()
    except OSError as error:
        raise UserError(
            f"{workdir} is no training run: {error}.", "Expected kernjax.demo.train's --workdir."
        ) from None
    config = ModelConfig.from_dict(raw)
    params, progress = checkpoint.load_params(workdir, net.init_params(config, 0))
    save_hf(params, raw, out, dtype="bfloat16")
    (out / "tokenizer.json").write_text(tokenizer)
    _write_json(
        out / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": END_OF_TEXT,
            "bos_token": END_OF_TEXT,
            "clean_up_tokenization_spaces": False,
            "model_max_length": config.max_position_embeddings,
        },
    )
    _write_json(
        out / "generation_config.json",
        {"do_sample": True, "temperature": 1.0, "bos_token_id": 0, "eos_token_id": 0},
    )
    log = [json.loads(line) for line in (workdir / "log.jsonl").read_text().splitlines()]
    held_out = next((row["held_out"] for row in reversed(log) if "held_out" in row), None)
    size = int(sum(np.size(x) for x in _arrays(params)))
    (out / "README.md").write_text(
        model_card(config, size, progress, card, log, held_out, measured)
    )
    return {
        "out": str(out),
        "parameters": size,
        "held_out": held_out,
        **dataclasses.asdict(progress),
    }


def model_card(
    config: Any,
    size: int,
    progress: Any,
    data: dict[str, Any],
    log: list[dict[str, Any]],
    held_out: dict[str, float] | None,
    measured: dict[str, Any] | None,
) -> str:
    """README.md of the directory: what the model is, learnt from what, how well, and its limits."""
    kinds = {"linear_attention": "gated delta net", "full_attention": "gated attention"}
    counts = ", ".join(f"{config.layer_types.count(kind)} {name}" for kind, name in kinds.items())
    # A resumed run repeats the steps after its checkpoint: the last line of each counts.
    by_step = {row["step"]: row["length"] for row in log if "length" in row}
    steps_at = Counter(by_step[step] for step in by_step if step <= progress.step)
    rows = [
        f"| {row['split'].replace('_', ' ')} | {row['kind']} | {row['documents']:,} "
        f"| {row['bytes']:,} | {row['tokens']:,} |"
        for row in data["sources"]
    ]
    books = next(row["names"] for row in data["sources"] if row["kind"] == "prose")
    loss = (
        "not measured"
        if held_out is None
        else ", ".join(f"{kind} {value:.3f}" for kind, value in held_out.items())
    )
    parts = [
        "---\nlicense: apache-2.0\nlibrary_name: transformers\n---",
        "# kernjax demo: a small hybrid of gated delta net and gated attention",
        f"{size:,} parameters, {config.num_layers} layers ({counts}), width {config.hidden_size}, "
        f"{config.vocab_size} byte-level BPE tokens, layout `qwen3_5_text`. Made to try inference "
        "kernels on: small enough for a laptop, with the layers, the operations and the published "
        "layout of its large relatives. It is no useful language model.",
        "## Text\n\n| split | kind | documents | bytes | tokens |\n"
        "| --- | --- | ---: | ---: | ---: |\n"
        + "\n".join(rows)
        + f"\n\nProse: {data['prose']} ({', '.join(books)}). Code: {data['code']}. Held out: the "
        "end of the first book, and the modules whose names' hashes fall in one class of many.",
        "## Training\n\n"
        f"{progress.step:,} steps, {progress.tokens:,} tokens (half prose, half code), "
        f"{progress.seconds / 60:.0f} minutes on a CPU, with Muon and AdamW, float32 parameters "
        "and bfloat16 products: "
        + ", ".join(f"{steps_at[length]:,} steps at length {length}" for length in sorted(steps_at))
        + ". Made by `python -m kernjax.demo.train`.",
        f"## Loss\n\nHeld-out nats a token at a context of {EVAL_CONTEXT}: {loss}.",
    ]
    if measured is not None:
        parts.append(measured_table(measured))
    parts.append(
        f"## Limits\n\nEnglish prose of {len(books)} old novels and one library's Python: expect "
        "nothing else. Positions beyond the longest training length were never trained; the "
        "rotary angles there are none that training did not show. Weights are rounded to bfloat16 "
        "once, after training. How large an error a kernel makes here does not tell how large it "
        "is in a model of billions of parameters; whether it stands out from the normal "
        "difference, and how it grows with depth, is what can be seen."
    )
    return "\n\n".join(parts) + "\n"


EVAL_CONTEXT = 2048


def measured_table(measured: dict[str, Any]) -> str:
    """Loss and mass outside the top 20 by kind and depth, as a Markdown table."""
    lines = [
        "## By depth\n\nHeld-out text, the bfloat16 weights computed in float32.\n",
        "| kind | positions | nats a token | mass outside the top 20 | median top-1 probability |",
        "| --- | --- | ---: | ---: | ---: |",
    ]
    lines += [
        f"| {row['kind']} | {row['from']}-{row['to']} | {row['loss']:.3f} | {row['tail']:.4f} "
        f"| {row['top1']:.3f} |"
        for row in measured["rows"]
    ]
    return "\n".join(lines)


def _arrays(tree: Any) -> list[Any]:
    if isinstance(tree, dict):
        return [leaf for branch in tree.values() for leaf in _arrays(branch)]
    return [tree]


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


if __name__ == "__main__":
    command.run(main, FLAGS)
