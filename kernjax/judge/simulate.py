"""Synthetic truth: how often the verdict is right, on recordings whose effect is known.

    python -m kernjax.judge.simulate [--draws=200] [--seed=0] [--effects=normal] [--stress]

prints, for bands of freshly drawn normals at the bundled corpora's size, how often a further
normal and candidates with planted effects come out PASS, FAIL or INCONCLUSIVE, the upper 95 %
binomial bound of FAIL, and how often the one-sided 95 % bounds of the geometric R hold the truth.
`--effects` names some of the candidates; `normal`, drawn first, comes to the same without the
others. `--stress` does so for corpora that are harder: heavier tails, positions that go together,
ties, no flips at all, few or noisy producers, few segments.

The model of a decoded position: producer m adds noise g_m (some components, correlated between
producers and along positions) to the logits, of a size that varies between segments and from
position to position with heavy tails and clusters:

    KL = 1/2 R size^2 mean(g_m^2),   margin change = sqrt(2 R) size g_m1,   flip: change < -margin

Producers differ by a factor of their own (`producer_sd`, in ln), and by another in every segment
(`segment_sd`), which with the position noise makes the sd of ln R per segment 0.05 to 0.25.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from kernjax.base.errors import UserError
from kernjax.judge.calibrate import calibrate
from kernjax.judge.comparison import DECODE, PREFILL, RESCORE, Comparison, Segment
from kernjax.judge.quantiles import binomial_bounds
from kernjax.judge.verdict import Verdict, judge

_COMPONENTS = 4


@dataclass(frozen=True)
class Design:
    """The corpus and the noise of a simulation; lengths in tokens, spreads in ln units."""

    kinds: tuple[str, ...] = ("code", "prose")
    contexts: tuple[int, ...] = (512, 2048, 8192, 16384)
    per_cell: int = 16  # segments per kind and context
    steps: int = 128  # decoded positions a segment
    edges: int = 13  # scored prefill rows after edges
    normals: int = 5
    producer_sd: float = 0.02
    segment_sd: float = 0.08
    size_sd: float = 0.6  # of ln noise size, position to position
    heavy: float = 0.5  # one position in fifty: ln size further up by exponentials of this mean
    memory: float = 0.9  # correlation of neighbouring positions
    shared: float = 0.3  # of a producer's noise variance common to all producers
    size: float = 0.01  # rms logit noise on prose; code has a fifth
    ties: float = 0.0  # share of positions at which the reference's first two words are equal
    least_margin: float = 0.0  # added to every margin: 5 leaves no flips

    def segments(self) -> tuple[Segment, ...]:
        """kind x context x per_cell, in the order of a recording."""
        return tuple(
            Segment(f"{kind}-{context}-{i}", kind, context, self.steps)
            for kind in self.kinds
            for context in self.contexts
            for i in range(self.per_cell)
        )


@dataclass(frozen=True)
class Effect:
    """What is wrong with a candidate: factors on its KL; the default is nothing."""

    name: str = "normal"
    ratio: float = 1.0  # at every decoded position
    per_doubling: float = 1.0  # of the context, from the shallowest on
    late: float = 1.0  # in the second half of the decode steps
    spikes: float = 0.0  # share of positions with KL 1,000 times
    edges: float = 1.0  # on the scored prefill rows after edges
    rescored: float = 1.0  # on the decoded tokens scored a second time, by one prefill
    own: float = 1.0  # on decode against one-shot prefill
    nan: bool = False  # one value is not finite
    at_floor: bool = False  # `ratio` times the smallest ratio that the band claims to detect

    @property
    def is_uniform(self) -> bool:
        """Whether every decoded position's KL has the same factor, so that the true R is known."""
        return replace(self, name="", ratio=1.0, at_floor=False) == Effect("")

    def factor(self, design: Design, rng: np.random.Generator) -> np.ndarray:
        """[segments, steps] factor on the KL of decoded positions."""
        depth = np.log2([s.context_len / min(design.contexts) for s in design.segments()])
        factor = self.ratio * self.per_doubling ** depth[:, None] * np.ones(design.steps)
        factor[:, design.steps // 2 :] *= self.late
        return np.where(rng.random(factor.shape) < self.spikes, 1000.0 * factor, factor)


@dataclass
class Corpus:
    """One drawn corpus: what all producers share. Producers are drawn from it by `producer`."""

    design: Design
    rng: np.random.Generator
    count: int = field(default=0, init=False)
    ln_factors: list[float] = field(default_factory=list, init=False)  # of each producer drawn

    def __post_init__(self) -> None:
        d, rng = self.design, self.rng
        self.segments = d.segments()
        n = len(self.segments)
        scale = np.array([1.0 if s.kind == "prose" else 0.2 for s in self.segments])[:, None]
        width = d.steps + d.edges + 1  # decode, then prefill edges, then the prompt's last
        wander = d.size_sd * self._along(rng.standard_normal((n, width)))
        # One position in fifty is far more sensitive: the heavy tail of real text.
        heavy = np.where(rng.random((n, width)) < 0.02, rng.exponential(d.heavy, (n, width)), 0.0)
        size = d.size * scale * np.exp(0.3 * rng.standard_normal((n, 1)) + wander + heavy)
        self.own_size = size[:, : d.steps] * 0.7
        # Code is confident: most margins are far from a tie.
        margin = rng.exponential(np.where(scale < 1, 3.0, 1.0), (n, width)) + d.least_margin
        if d.ties:
            margin[rng.random((n, width)) < d.ties] = 0.0
        tail = rng.beta(1.5, 10.0, (n, width)) * scale
        target = -rng.exponential(2.0, (n, width))
        # Last, the decoded tokens rescored: the same text, rounded otherwise.
        self.size, self.margin, self.tail, self.target = (
            np.concatenate([rows, rows[:, : d.steps]], axis=1)
            for rows in (size, margin, tail, target)
        )
        self.common = rng.standard_normal((*self.size.shape, _COMPONENTS))

    def _along(self, noise: np.ndarray) -> np.ndarray:
        """AR(1) along axis 1 with unit variance."""
        rho = self.design.memory
        out = noise.copy()
        for step in range(1, noise.shape[1]):
            out[:, step] = rho * out[:, step - 1] + np.sqrt(1 - rho * rho) * noise[:, step]
        return out

    def producer(self, effect: Effect | None = None, name: str | None = None) -> Comparison:
        """The comparison of a further producer against the reference."""
        effect = effect or Effect()
        d, rng = self.design, self.rng
        n, width = self.size.shape
        self.count += 1
        own = rng.standard_normal((n, width, _COMPONENTS))
        g = np.sqrt(d.shared) * self.common + np.sqrt(1 - d.shared) * own
        producer = d.producer_sd * rng.standard_normal()
        factor = np.exp(producer + d.segment_sd * rng.standard_normal((n, 1))) * np.ones((n, width))
        last = d.steps + d.edges
        factor[:, : d.steps] *= effect.factor(d, rng)
        factor[:, d.steps : last] *= effect.edges
        factor[:, last + 1 :] *= effect.rescored
        size = self.size * np.sqrt(factor)
        kl = 0.5 * size**2 * np.mean(g * g, axis=2)
        change = np.sqrt(2.0) * size * g[:, :, 0]
        tail_change = size * g[:, :, 1] * self.tail * (1 - self.tail)
        self_kl = np.full((n, width), np.nan)
        echo = rng.standard_normal((n, d.steps, _COMPONENTS))
        self_kl[:, : d.steps] = (
            0.5 * self.own_size**2 * factor[:, :1] * effect.own * np.mean(echo * echo, axis=2)
        )
        finite = np.ones((n, width), dtype=bool)
        if effect.nan:
            finite[n // 2, d.steps // 2] = False
            kl[~finite] = change[~finite] = tail_change[~finite] = np.nan
        self.ln_factors.append(producer)
        return self._comparison(kl, change, tail_change, self_kl, finite, name or effect.name)

    def _comparison(self, kl, change, tail_change, self_kl, finite, name) -> Comparison:
        d, (n, width) = self.design, self.size.shape
        context = np.array([s.context_len for s in self.segments])[:, None]
        steps = np.arange(d.steps)[None, :]
        edge = (np.arange(d.edges)[None, :] + 1) * 3 + 64
        last = np.full((n, 1), -1)
        decoded = context + steps
        pos = np.concatenate([decoded, np.repeat(edge, n, 0), context + last, decoded], axis=1)
        phase = np.repeat([DECODE, PREFILL, RESCORE], [d.steps, d.edges + 1, d.steps])
        flipped = finite & (np.nan_to_num(change) < -self.margin)
        tied = self.margin == 0
        return Comparison(
            segments=self.segments,
            segment=np.repeat(np.arange(n), width),
            pos=pos.ravel(),
            phase=np.tile(phase, n).astype(np.uint8),
            kl=kl.ravel(),
            self_kl=self_kl.ravel(),
            flipped=(flipped & ~tied).ravel(),
            tie_flipped=(flipped & tied).ravel(),
            margin=self.margin.ravel(),
            margin_change=change.ravel(),
            tail_mass=self.tail.ravel(),
            tail_change=tail_change.ravel(),
            finite=finite.ravel(),
            reference_target=self.target.ravel(),
            candidate_target=self.target.ravel(),
            reference_manifest={"logits_dtype": "float32"},
            candidate_manifest={"logits_dtype": "float32"},
            reference_identity="simulated",
            candidate_digest=f"{name} {self.count}",
            candidate_name=f"{name} {self.count}",
        )


EFFECTS = (
    Effect(),
    Effect("R 1.1", ratio=1.1),
    Effect("R 1.2", ratio=1.2),
    Effect("R 1.3", ratio=1.3),
    Effect("R 1.5", ratio=1.5),
    Effect("R 2", ratio=2.0),
    Effect("at the claimed floor", at_floor=True),
    Effect("half", ratio=0.5),
    Effect("grows 1.06 a doubling", per_doubling=1.06),
    Effect("late steps 1.3", late=1.3),
    Effect("1000x on 1 %", spikes=0.01),
    Effect("edges 3x", edges=3.0),
    Effect("rescored 1.5", rescored=1.5),
    Effect("decode vs prefill 10x", own=10.0),
    Effect("one NaN", nan=True),
)


@dataclass
class Tally:
    """Outcomes of one effect over the draws, and which gates were not passed how often."""

    outcomes: Counter[str] = field(default_factory=Counter)
    gates: Counter[str] = field(default_factory=Counter)
    below: int = 0  # level rows whose upper bound is not below the true R
    above: int = 0  # level rows whose lower bound is not above it
    rows: int = 0  # level rows with a known true R

    def share(self, outcome: str) -> float:
        """Fraction of the draws with this outcome."""
        return self.outcomes[outcome] / max(sum(self.outcomes.values()), 1)

    def upper(self, outcome: str) -> float:
        """Its upper 95 % binomial bound."""
        return binomial_bounds(self.outcomes[outcome], sum(self.outcomes.values()))[1]

    def check(self, verdict: Verdict, ln_ratio: float) -> None:
        """Counts which one-sided bounds of the geometric R, all depths, hold the true one."""
        for gate in verdict.gates:
            whole = gate.name == "level" and gate.context_len is None
            if whole and gate.mean == "geometric" and gate.low and gate.high:
                self.rows += 1
                self.below += np.log(gate.high) >= ln_ratio
                self.above += np.log(gate.low) <= ln_ratio


def study(
    draws: int,
    seed: int = 0,
    effects: Sequence[Effect] = EFFECTS,
    design: Design | None = None,
    progress: Callable[[int], None] | None = None,
) -> tuple[dict[str, Tally], int]:
    """Tally by effect, and how many of the drawn bands were refused (and are left out)."""
    design = design or Design()
    tallies = {effect.name: Tally() for effect in effects}
    refused = 0
    for draw in range(draws):
        corpus = Corpus(design, np.random.default_rng([seed, draw]))
        normals = [corpus.producer(name=f"n{i}") for i in range(design.normals)]
        try:
            band = calibrate(None, normals)
        except UserError:
            refused += 1
            continue
        centre = np.mean(corpus.ln_factors)
        for effect in effects:
            floor = max(band.detection_floor.values()) if effect.at_floor else 1.0
            planted = replace(effect, ratio=effect.ratio * floor)
            candidate = corpus.producer(planted)
            verdict = judge(candidate, band)
            tally = tallies[effect.name]
            if effect.is_uniform:
                own = corpus.ln_factors[-1] + np.log(planted.ratio)
                tally.check(verdict, own - centre)
            tally.outcomes[str(verdict.outcome)] += 1
            tally.gates.update({g.name for g in verdict.gates if g.outcome != "PASS"})
        if progress:
            progress(draw)
    return tallies, refused


def table(tallies: dict[str, Tally], refused: int) -> str:
    """The outcomes as text, one effect a line, in per cent.

    `FAIL <`: the upper 95 % bound of the true share of FAIL. `bounds hold`: how often the true R
    is above the lower and below the upper bound; 95 is what they claim.
    """
    lines = [
        f"{'effect':<24}{'PASS':>7}{'FAIL':>7}{'FAIL <':>8}{'INCONCL':>9}{'bounds hold':>13}"
        "  gates not passed (%)"
    ]
    for name, tally in tallies.items():
        total = max(sum(tally.outcomes.values()), 1)
        gates = ", ".join(
            f"{gate} {100 * count / total:.0f}" for gate, count in tally.gates.most_common(4)
        )
        shares = [100 * tally.share(outcome) for outcome in ("PASS", "FAIL", "INCONCLUSIVE")]
        held = "-"
        if tally.rows:
            held = " / ".join(f"{100 * k / tally.rows:.0f}" for k in (tally.above, tally.below))
        lines.append(
            f"{name:<24}{shares[0]:>7.1f}{shares[1]:>7.1f}{100 * tally.upper('FAIL'):>8.1f}"
            f"{shares[2]:>9.1f}{held:>13}  {gates}"
        )
    lines.append(f"bands refused: {refused}")
    return "\n".join(lines)


STRESS: dict[str, Design] = {
    "heavier tails": Design(heavy=1.0),
    "neighbouring positions go together": Design(memory=0.98),
    "one position in fifty is a tie": Design(ties=0.02),
    "no flips at all": Design(least_margin=5.0),
    "four producers": Design(normals=4),
    "producers differ by 5 %": Design(producer_sd=0.05),
    "segments differ by 20 %": Design(segment_sd=0.2),
    "24 segments a kind and depth": Design(per_cell=24, contexts=(512, 2048)),
}
_STRESSED = ("normal", "R 2", "at the claimed floor", "1000x on 1 %")


def main() -> None:
    """Prints the table; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draws", type=int, default=200, help="bands drawn")
    parser.add_argument("--seed", type=int, default=0, help="of the generator")
    parser.add_argument(
        "--effects",
        default=[effect.name for effect in EFFECTS],
        type=lambda text: text.split(","),
        help="candidates by name, comma between; all by default",
    )
    parser.add_argument("--normals", type=int, default=5, help="producers a band")
    parser.add_argument("--producer_sd", type=float, default=0.02, help="ln factor of a producer")
    parser.add_argument("--segment_sd", type=float, default=0.08, help="ln factor in a segment")
    parser.add_argument("--heavy", type=float, default=0.5, help="tail of the KL: 1 is extreme")
    parser.add_argument("--per_cell", type=int, default=16, help="segments per kind and depth")
    parser.add_argument("--stress", action="store_true", help="the harder corpora instead")
    args = parser.parse_args()
    known = {effect.name: effect for effect in EFFECTS}
    if unknown := [name for name in args.effects if name not in known]:
        parser.error(f"no effect is called {', '.join(unknown)}; there are {', '.join(known)}")
    if args.stress:
        effects = [known[name] for name in args.effects if name in _STRESSED]
        for name, design in STRESS.items():
            print(f"{name}:\n{table(*study(args.draws, args.seed, effects, design))}\n", flush=True)
        return
    design = Design(
        normals=args.normals,
        producer_sd=args.producer_sd,
        segment_sd=args.segment_sd,
        heavy=args.heavy,
        per_cell=args.per_cell,
    )
    effects = [known[name] for name in args.effects]
    tallies, refused = study(args.draws, args.seed, effects, design)
    print(table(tallies, refused))


if __name__ == "__main__":
    main()
