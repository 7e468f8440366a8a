"""The instrument on a tiny checkpoint: what tests of the commands share."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from tiny import make_corpus, write_checkpoint

from kernjax.base import command
from kernjax.texts import write_corpus

LAYERS = {
    "layer_types": ["linear_attention", "full_attention"],
    "num_hidden_layers": 2,
}


def run(module, *argv: str) -> int:
    """A command in this process; its exit code."""
    return command.execute(module.main, module.FLAGS, argv)


def last_line(capsys) -> dict:
    """The JSON object that ends a command's standard output."""
    return json.loads(capsys.readouterr().out.splitlines()[-1])


@dataclasses.dataclass(frozen=True)
class Instrument:
    folder: Path
    model: Path
    corpus: Path
    reference: Path

    @classmethod
    def make(cls, folder: Path) -> Instrument:
        from kernjax import record

        model = write_checkpoint(folder / "model", **LAYERS)
        corpus = write_corpus(make_corpus({48: 3, 96: 3}), folder / "corpus")
        self = cls(folder, model, corpus, folder / "reference")
        assert self.record(record, "--out", str(self.reference)) == 0
        return self

    @property
    def subject(self) -> tuple[str, ...]:
        return ("--model", str(self.model), "--corpus", str(self.corpus), "--batch_size", "8")

    def record(self, module, *argv: str) -> int:
        """A command on all this; what `argv` gives takes the place of the subject's own."""
        given = {word.partition("=")[0] for word in argv}
        pairs = zip(self.subject[::2], self.subject[1::2], strict=True)
        subject = [word for pair in pairs if pair[0] not in given for word in pair]
        return run(module, *subject, *argv)
