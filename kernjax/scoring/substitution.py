"""A candidate put in place layer by layer and site by site, in one compiled program.

The base is what the candidate is a change of. Every layer has a few plans (the base's, the whole
candidate's, and one a site), and which of them it runs is an argument of the compiled functions,
so that a search compiles once.

On float32 (`isolated`) the base is the ground truth, and a kernel sits behind the door of the
production's activations, against the op's own implementation behind the same door: errors then
are the candidate's own. In place the base is the production policy.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence

import numpy as np

from kernjax.base.errors import UserError
from kernjax.model import ModelConfig
from kernjax.model.execution import Execution, LayerPlan
from kernjax.plugins import Kernel, check_called, check_layers, check_policy
from kernjax.precision import LayerPolicy, Policy, executed_sites
from kernjax.precision.fields import FIELDS
from kernjax.precision.lenses import delta
from kernjax.precision.named import named_policy
from kernjax.precision.policy import Setting, apply
from kernjax.precision.sites import kind_of
from kernjax.recording import Recording
from kernjax.scoring.batch import RowPlan, Scorer
from kernjax.scoring.door import behind_door
from kernjax.scoring.positions import PREFILL
from kernjax.scoring.session import Session
from kernjax.texts import Segment
from pallas_kernels.ops import OPS

EVERYTHING = 1  # the variant that runs the whole candidate; single sites follow


@dataclasses.dataclass(frozen=True)
class Site:
    """One thing that the candidate changes: a field of the policy, or the kernel of an op."""

    name: str  # `attention.p`, or the op's name
    change: str  # `attention.p=fp8`, or `attention.prefill=module:function`
    layers: tuple[int, ...]  # that run it
    variant: int  # its number in `Substitution`


@dataclasses.dataclass(frozen=True)
class Rows:
    """Scored rows of the chosen segments, in the order of the reference's recording."""

    segment: np.ndarray  # [R] index into `Substitution.segments`
    pos: np.ndarray
    phase: np.ndarray
    cells: np.ndarray  # [R, 21] float32 log-probabilities at the reference's ids, then the tail


class Substitution:
    """Scores segments with the candidate in some layers and the base in the others.

    `sites` are the candidate's changes inside the layers, `outside` says what it changes beyond
    them (weights, logits, the prefill window, the top's own formats). UserError where the candidate
    changes nothing on this base.
    """

    def __init__(
        self,
        session: Session,
        policy: Policy,
        production: Policy,
        kernels: Mapping[str, Kernel] | None = None,
        *,
        isolated: bool = True,
        limit: int = 2,
    ) -> None:
        kernels = dict(kernels or {})
        self._session = session
        base = named_policy("f32") if isolated else production
        settings = delta(policy, production)
        candidate = apply(settings, base)
        ours, theirs = dict(kernels), {}
        if isolated and kernels:
            ours, theirs = behind_door(kernels, production.activations)
        self.base = session.producer(base, theirs or None)
        self.config = self.base.config
        self._settings = settings
        self._ours, self._theirs = ours, theirs
        self.segments = _chosen(session, limit)
        _check(session, policy, kernels, self.config)
        self.execution = self._execution(base, (), {})
        executions = [self._execution(base, settings, ours)]
        changes = [*dict.fromkeys(s.field for s in settings), *ours]
        for name in changes:
            mine = [s for s in settings if s.field == name]
            kernel = {name: ours[name]} if name in ours else {}
            executions.append(self._execution(base, mine, kernel))
        self.sites = self._sites(changes, executions[1:])
        # A single site is the whole candidate, and needs no plan of its own.
        self.variants = tuple(executions if len(self.sites) > 1 else executions[:1])
        self.layers = tuple(sorted({layer for site in self.sites for layer in site.layers}))
        self.outside = [
            str(s)
            for s in settings
            if not FIELDS[s.field].per_layer
            or (not s.layers and FIELDS[s.field].get(base) != s.value and _is_at_the_top(s.field))
        ]
        if not self.layers and not self.outside:
            raise UserError(
                f"The candidate changes nothing of {base} that this model executes.",
                "A candidate adds rounding, or puts a kernel in place of an op.",
                "Drop --isolated to look at it on the production policy."
                if isolated
                else "Name another policy or kernel.",
            )
        self._scorer = Scorer(
            self.base.decoder,
            self.execution,
            base.prefill_window,
            variants=self.variants,
        )
        self._whole = session.producer(candidate, ours or None) if self.outside else None

    def op_of(self, site: Site) -> str:
        """The op that executes a site, in prefill, in decode or in both: as plug-ins are named."""
        if site.name in OPS:
            return site.name
        windows = max(-(-s.context_len // self.base.policy.prefill_window) for s in self.segments)
        kinds = self.config.layer_types
        ops = {
            "attention": ("attention.prefill", "attention.decode"),
            "delta_rule": ("delta_rule.chunked", "delta_rule.recurrent"),
        }.get(site.name.partition(".")[0])
        if ops is None or site.name == "delta_rule.qk":
            return site.name  # it lies between ops
        executed = (
            site.name in executed_sites(kinds, windows=windows, decode_steps=0),
            site.name in executed_sites(kinds, windows=0, decode_steps=1),
        )
        return " and ".join(op for op, does in zip(ops, executed, strict=True) if does)

    def run(self, which: np.ndarray) -> Rows:
        """Rows with layer i at variant `which[i]`: 0 the base, 1 the candidate, or a site's."""
        self._scorer.choose(which)
        return self._score(self._scorer)

    def run_whole(self) -> Rows:
        """Rows of the complete candidate, with what it changes outside the layers."""
        if self._whole is None:
            rows = self.run(self.chosen(self.layers))
        else:
            rows = self._score(self._whole.scorer)
        check_called(self._ours)
        return rows

    def chosen(self, layers: Sequence[int], variant: int = EVERYTHING) -> np.ndarray:
        """int32 [layers] for `run`: this variant at these layers, the base elsewhere."""
        which = np.zeros(self.config.num_layers, np.int32)
        which[list(layers)] = variant
        return which

    def _score(self, scorer: Scorer) -> Rows:
        session, reference = self._session, self._session.reference
        found: dict[int, dict[str, np.ndarray]] = {}
        for batch in _batches(self.segments, session.batch_size):
            chosen = [self.segments[i] for i in batch]
            plans = [_plan(reference, segment) for segment in chosen]
            tokens = np.stack([segment.tokens for segment in chosen])
            scored = scorer.score(tokens, chosen[0].context_len, plans)
            found |= dict(zip(batch, scored, strict=True))
        parts = [found[i] for i in range(len(self.segments))]
        cells = [
            np.concatenate([part["top_logprobs"], part["tail_logprob"][:, None]], axis=1)
            for part in parts
        ]
        return Rows(
            np.repeat(np.arange(len(parts)), [len(part["pos"]) for part in parts]),
            np.concatenate([part["pos"] for part in parts]),
            np.concatenate([part["phase"] for part in parts]),
            np.concatenate(cells),
        )

    def _execution(
        self, base: Policy, settings: Sequence[Setting], kernels: Mapping[str, Kernel]
    ) -> Execution:
        """`base` with these changes, each only at layers of the kind that executes it."""
        plans = []
        for index, kind in enumerate(self.config.layer_types):
            policy: LayerPolicy = base.for_layer(index)
            for setting in settings:
                inside = FIELDS[setting.field].per_layer and kind_of(setting.field) in (None, kind)
                if inside and (not setting.layers or setting.covers(index)):
                    policy = FIELDS[setting.field].set(policy, setting.value)
            plugged = {**self._theirs, **kernels}
            own = {
                op: kernel
                for op, kernel in plugged.items()
                if kind_of(f"{op}.") == kind and kernel.covers(index)
            }
            plans.append(LayerPlan(policy, tuple(sorted(own.items(), key=lambda item: item[0]))))
        return Execution(self.base.execution.top, tuple(plans))

    def _sites(self, changes: Sequence[str], executions: Sequence[Execution]) -> tuple[Site, ...]:
        plain = self.execution.layers
        found = []
        for name, execution in zip(changes, executions, strict=True):
            layers = tuple(
                i for i, (a, b) in enumerate(zip(plain, execution.layers, strict=True)) if a != b
            )
            if name in self._ours:
                change = f"{name}={self._ours[name].name}"
            else:
                change = ",".join(str(s) for s in self._settings if s.field == name)
            if layers:
                found.append((name, change, layers))
        several = len(found) > 1
        return tuple(
            Site(name, change, layers, EVERYTHING + 1 + changes.index(name) if several else 1)
            for name, change, layers in found
        )


def _check(
    session: Session, policy: Policy, kernels: Mapping[str, Kernel], config: ModelConfig
) -> None:
    """UserError for layers that do not exist and for what this corpus never executes."""
    policy.validate_layers(config.num_layers, config.layer_types)
    check_policy(kernels, policy)
    check_layers(kernels, config.layer_types)
    segments, window = session.corpus.segments, policy.prefill_window
    policy.check_executed(
        executed_sites(
            config.layer_types,
            windows=max(-(-segment.context_len // window) for segment in segments),
            decode_steps=max(segment.score_len for segment in segments),
        )
    )


def _is_at_the_top(field: str) -> bool:
    """Whether the embedding, the final norm and the output matrix read this field, too."""
    return field in ("activations", "dot")


def _chosen(session: Session, limit: int) -> list[Segment]:
    known = {segment["id"] for segment in session.reference.segments}
    return [
        segment
        for group in session.corpus.strata().values()
        for segment in [s for s in group if s.id in known][:limit]
    ]


def _plan(reference: Recording, segment: Segment) -> RowPlan:
    """The reference's rows of a segment, without those that score the decoded tokens again."""
    rows = reference.rows_of(segment.id)
    prefill = reference.pos[rows][reference.phase[rows] == PREFILL]
    count = len(prefill) + segment.score_len
    return RowPlan(prefill, False, reference.top_ids[rows][:count])


def _batches(segments: Sequence[Segment], size: int) -> list[list[int]]:
    def shape(index: int) -> tuple[int, int]:
        return segments[index].context_len, segments[index].score_len

    groups = itertools.groupby(sorted(range(len(segments)), key=shape), key=shape)
    batches = []
    for _, group in groups:
        indices = list(group)
        batches += [indices[at : at + size] for at in range(0, len(indices), size)]
    return batches
