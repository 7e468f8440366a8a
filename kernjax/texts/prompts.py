"""Prompts to sample a corpus from: one JSON object a line, as GSM8K and its like are published."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np

from kernjax.base.errors import UserError
from kernjax.texts.segments import Segment
from kernjax.texts.tokenizing import Tokenizer

_TEXT_KEYS = ("prompt", "question", "text")


@dataclasses.dataclass(frozen=True, eq=False)
class Prompt:
    """Where a sampled segment begins: `ids` int32 [n], n at least 1; `text` where it was text."""

    id: str
    kind: str
    ids: np.ndarray
    text: str | None = None


def read_prompts(
    path: str | Path,
    tokenizer: Tokenizer | None,
    *,
    kind: str = "sampled",
    template: str = "{prompt}",
    limit: int | None = None,
) -> list[Prompt]:
    """The prompts of a JSONL file, at most `limit`.

    A line is an object with `prompt`, `question` or `text` (text, put into `template`), or `tokens`
    (ids); optionally `id` (default: prompt-LINE) and `kind`. Other keys are ignored. Raises
    UserError naming the line.
    """
    path = Path(path)
    if "{prompt}" not in template:
        raise UserError(f"template={template!r} has no {{prompt}}.", "Expected it once.")
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}.", "Expected JSON lines.") from None
    prompts: list[Prompt] = []
    seen: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        if limit is not None and len(prompts) == limit:
            break
        where = f"{path}, line {number}"
        prompt = _prompt(line, where, number, tokenizer, kind, template)
        if prompt.id in seen:
            raise UserError(
                f"{where}: the id {prompt.id!r} is that of line {seen[prompt.id]}.",
                "Expected ids that differ.",
            )
        seen[prompt.id] = number
        prompts.append(prompt)
    if not prompts:
        raise UserError(f"{path} holds no prompt.", "Expected one JSON object a line.")
    return prompts


def check_lengths(prompts: list[Prompt], context_len: int) -> None:
    """Raises UserError when a prompt is longer than the context it is to begin."""
    for prompt in prompts:
        if len(prompt.ids) > context_len:
            raise UserError(
                f"Prompt {prompt.id!r} has {len(prompt.ids)} tokens.",
                f"Expected at most context_len={context_len}: only sampled tokens are scored.",
                "Raise --context_len or shorten the prompt.",
            )


def _prompt(
    line: str, where: str, number: int, tokenizer: Tokenizer | None, kind: str, template: str
) -> Prompt:
    try:
        record: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"{where} is not JSON: {error.msg}.", "Expected an object.") from None
    if not isinstance(record, dict):
        raise UserError(f"{where} is no object.", f"Expected {{{_TEXT_KEYS[0]!r}: ...}}.")
    keys = [key for key in (*_TEXT_KEYS, "tokens") if key in record]
    if not keys:
        raise UserError(
            f"{where} has the keys {', '.join(record) or '(none)'}.",
            f"Expected one of {', '.join(_TEXT_KEYS)}, tokens.",
        )
    name, kind = str(record.get("id", f"prompt-{number}")), str(record.get("kind", kind))
    if keys[0] == "tokens":
        ids, text = _ids(record["tokens"], where), None
    else:
        text = record[keys[0]]
        if not isinstance(text, str) or not text:
            raise UserError(f"{where}: {keys[0]}={text!r}.", "Expected a text that is not empty.")
        if tokenizer is None:
            raise UserError(
                f"{where} is a text, and the model has no tokenizer.json.",
                "Expected a tokenizer, or prompts of `tokens`.",
            )
        text = template.replace("{prompt}", text)
        ids = tokenizer.encode(text)
        if not len(ids):
            raise UserError(f"{where}: the text has no token.", "Expected at least one.")
    # The same rules as for a segment, which it will become.
    Segment(name, kind, 1, 0, np.zeros(2, np.int32))
    return Prompt(name, kind, ids, text)


def _ids(values: Any, where: str) -> np.ndarray:
    good = isinstance(values, list) and values
    if not good or not all(type(value) is int and 0 <= value < 1 << 31 for value in values):
        raise UserError(f"{where}: tokens is no list of token ids.", "Expected [12, 7, ...].")
    return np.asarray(values, np.int32)
