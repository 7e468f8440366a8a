"""One model and one corpus on which several producers are recorded, for check and calibrate."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kernjax.base.resources import model_directory
from kernjax.plugins import Kernel
from kernjax.precision import Policy
from kernjax.recording import Recording, load_recording
from kernjax.scoring.batch import Scorer
from kernjax.scoring.producer import Checkpoint, Following, JaxProducer, scorer_of_shapes
from kernjax.scoring.recorder import Progress, limited, record_corpus, shapes_at
from kernjax.scoring.routes import ROUTE_IDS, ROWS
from kernjax.texts import Corpus, load_corpus
from kernjax.weights import parse_mesh


@dataclasses.dataclass(frozen=True)
class Session:
    """What every recording of one command shares."""

    model: Path
    corpus: Corpus
    reference: Recording
    batch_size: int
    mesh: str | None = None

    @classmethod
    def open(
        cls,
        model: str,
        corpus: str,
        reference: str,
        *,
        batch_size: int,
        mesh: str | None = None,
        mirror: str | None = None,
    ) -> Session:
        directory = model_directory(model)
        tokenizer = directory if (directory / "tokenizer.json").is_file() else None
        return cls(
            directory,
            load_corpus(corpus, tokenizer, mirror=mirror),
            load_recording(reference),
            batch_size,
            mesh,
        )

    @functools.cached_property
    def checkpoint(self) -> Checkpoint:
        """The model's files, read once for every producer of the session."""
        mesh = None if self.mesh is None else parse_mesh(self.mesh)
        return Checkpoint(self.model, mesh, progress=True)

    def producer(self, policy: Policy, kernels: Mapping[str, Kernel] | None = None) -> JaxProducer:
        """A producer on the session's weights; it keeps as much of a row as the reference."""
        scorer = None if kernels else self._ahead.pop(policy, None)
        return JaxProducer(self.checkpoint, policy, kernels, scorer=scorer, **self._kept)

    @property
    def _kept(self) -> dict[str, Any]:
        return {
            "full": "logprobs" in self.reference.extras,
            "routes": ROWS if ROUTE_IDS in self.reference.extras else None,
        }

    @functools.cached_property
    def _ahead(self) -> dict[Policy, Scorer]:
        """Scorers that compile before their producers exist."""
        return {}

    def _is_known_by_shape(self, policy: Policy) -> bool:
        # How packed weights lie, and how a mesh holds any, shows when they are read.
        return self.mesh is None and policy.dequantise == "load"

    def _follow(self, policy: Policy, limit: int | None) -> Following:
        scorer = scorer_of_shapes(self.checkpoint.config, policy, **self._kept)
        self._ahead[policy] = scorer
        corpus = limited(self.corpus, limit)
        shapes = shapes_at(corpus, policy.prefill_window, self.reference, self.batch_size)
        return scorer, shapes

    def record(
        self,
        producer: Policy | JaxProducer,
        out: Path,
        kernels: Mapping[str, Kernel] | None = None,
        *,
        limit: int | None = None,
        same_experts: bool = False,
        following: Sequence[tuple[Policy, int | None]] = (),
        on_progress: Callable[[Progress], None] = lambda progress: None,
    ) -> Recording:
        """Records a policy with `kernels`, or a producer of this session, at the reference's ids.

        Into `out`, or goes on with what is there. With `same_experts` every token is sent to the
        experts that it went to in the reference. `following`: policies, and their limits, that
        will be recorded next without kernels; they compile beside this one's run.
        """
        if isinstance(producer, Policy):
            producer = self.producer(producer, kernels)
        record_corpus(
            producer,
            limited(self.corpus, limit),
            out,
            reference=self.reference,
            experts_of=self.reference if same_experts else None,
            batch_size=self.batch_size,
            reuse=True,
            following=[self._follow(*one) for one in following if self._is_known_by_shape(one[0])],
            on_progress=on_progress,
        )
        return load_recording(out)
