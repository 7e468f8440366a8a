"""Text to token ids, by the tokenizer.json that lies beside a model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kernjax.base.errors import UserError
from kernjax.base.hashing import sha256_file

# A BPE merge never reaches over a pre-token (a word, a run of blanks), so ids this far before the
# end of a shortened text are those of the whole text.
_SETTLED = 64


class Tokenizer:
    """A tokenizer.json. `sha256` identifies it, `vocab_size` counts its ids (added ones too)."""

    def __init__(self, path: Path, backend: Any) -> None:
        self.path = path
        self.sha256 = sha256_file(path)
        self.vocab_size = int(backend.get_vocab_size(with_added_tokens=True))
        self._backend = backend

    def encode(self, text: str) -> np.ndarray:
        """Token ids int32 [n] of the text, without special tokens."""
        return self.encode_all([text])[0]

    def encode_all(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Token ids int32 [n] of each text, without special tokens."""
        encodings = self._backend.encode_batch(list(texts), add_special_tokens=False)
        return [np.asarray(encoding.ids, np.int32) for encoding in encodings]

    def encode_start(self, text: str, count: int) -> tuple[np.ndarray, int]:
        """The first `count` ids of the text (fewer when it is short), int32, and the number of
        characters they stand for. Reads no more of a long text than that takes."""
        taken = 8 * (count + _SETTLED)
        while True:
            encoding = self._backend.encode(text[:taken], add_special_tokens=False)
            if taken >= len(text) or len(encoding.ids) >= count + _SETTLED:
                break
            taken *= 2
        ids = np.asarray(encoding.ids[:count], np.int32)
        return ids, encoding.offsets[len(ids) - 1][1] if len(ids) else 0

    def decode(self, ids: Sequence[int]) -> str:
        """The text of the ids, special tokens included."""
        return self._backend.decode([int(id) for id in ids], skip_special_tokens=False)


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer of a model directory, or of a tokenizer.json itself.

    Raises UserError when there is none or it cannot be read.
    """
    path = Path(path)
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise UserError(
            f"{path} has no tokenizer.json." if path.is_dir() else f"{file} does not exist.",
            "A corpus of texts needs the model's tokenizer.json.",
            "Copy it beside the model, or use a corpus of token ids (kernjax.corpus build).",
        )
    from tokenizers import Tokenizer as Backend

    try:
        backend = Backend.from_file(str(file))
    except Exception as error:  # the Rust side raises bare Exception for whatever is wrong
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(
            f"{file} cannot be read as a tokenizer: {reason}.",
            "Expected a tokenizer.json of the `tokenizers` library.",
        ) from None
    backend.no_truncation()
    backend.no_padding()
    return Tokenizer(file, backend)
