"""The vendor's own numbers: transformers' modelling code, recorded like any other producer.

The checkpoint's own class runs in torch, float32 for the policy `f32` and bfloat16 for `bf16` and
`hf_bf16`: it rounds where it rounds, and nothing else can be asked of it. The prompt is prefilled
in windows through the class's cache, then decoded token by token through the same cache. Logits
are taken as the class gives them (bfloat16 in a bfloat16 model: the manifest says so) and scored
by the same function as ours. torch and transformers come with `pip install 'kernjax[transformers]'`
and are imported only where they are used.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernjax.base.errors import UserError

if TYPE_CHECKING:
    import numpy as np
    import torch

    from kernjax.model import ModelConfig
    from kernjax.precision import Policy
    from kernjax.scoring.batch import RowPlan
    from kernjax.scoring.producer import Following, Shape
    from kernjax.texts import Corpus

ATTENTION = ("eager", "sdpa")
_DTYPES = {"f32": "float32", "bf16": "bfloat16", "hf_bf16": "bfloat16"}
_OLDEST = (5, 24)  # renamed the models' `past_key_values` to `cache`
# The last two replace the class's torch code by kernels where they are installed.
_PACKAGES = ("numpy", "torch", "transformers", "flash-linear-attention", "causal-conv1d")

Progress = Callable[[int], None]


class TransformersProducer:
    """A `kernjax.scoring.producer.Producer` of the vendor's code.

    `policy` is f32, bf16 or hf_bf16, with any prefill window; UserError for another, for a
    directory that transformers cannot load whole, and where transformers is missing or too old.
    Runs on torch's CUDA device if there is one, else on the CPU.
    """

    def __init__(
        self, directory: str | Path, policy: Policy, *, attn_implementation: str = "eager"
    ) -> None:
        import jax

        from kernjax.model import ModelConfig
        from kernjax.scoring.rows import score_rows
        from kernjax.weights import text_tensors

        if attn_implementation not in ATTENTION:
            raise UserError(
                f"{attn_implementation=} is not known.", f"Expected one of {', '.join(ATTENTION)}."
            )
        self.directory, self.policy = Path(directory), policy
        self.attn_implementation = attn_implementation
        self.dtype = _dtype_of(policy)
        self.config = ModelConfig.from_directory(directory)
        _check_class(self.directory, self.config)
        _check_installed()
        text_tensors(directory, self.config)  # names and shapes, with errors that say which
        self.vocab_size = self.config.vocab_size
        self._model = _load(self.directory, self.dtype, attn_implementation)
        self._score_rows = jax.jit(score_rows)

    def identity(self) -> dict[str, Any]:
        from kernjax import __version__
        from kernjax.scoring.producer import commit, model_identity

        return {
            **model_identity(self.directory, self.config),
            "policy": self.policy.to_dict(),
            "kernels": {},
            "engine": "transformers",
            "attn_implementation": self.attn_implementation,
            "versions": {"kernjax": __version__, **_versions()},
            "device": _device_name(self._model.device),
            "mesh": None,
            "prefill_window": self.policy.prefill_window,
            "logits_dtype": self.dtype,
            "commit": commit(),
        }

    def check_corpus(self, corpus: Corpus) -> None:
        """Nothing to check: a policy that is accepted sets nothing by itself."""

    def compiling(
        self, batches: list[Shape], following: Sequence[Following] = ()
    ) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def score(
        self,
        tokens: np.ndarray,
        context_len: int,
        plans: list[RowPlan],
        progress: Progress = lambda done: None,
    ) -> list[dict[str, np.ndarray]]:
        """Rows of every segment of a batch; arguments and result as `Scorer.score`."""
        import torch
        from transformers import DynamicCache

        from kernjax.scoring.positions import DECODE, PREFILL, RESCORE

        ids = torch.from_numpy(tokens.astype("int64")).to(self._model.device)
        last = tokens.shape[1] - 1
        segments = [_Segment(row, plan) for row, plan in zip(tokens, plans, strict=True)]
        cache = DynamicCache(config=self._model.config)
        with torch.no_grad():
            for start, stop in _windows(context_len, self.policy.prefill_window):
                hidden = self._hidden(ids[:, start:stop], cache)
                for segment, states in zip(segments, hidden, strict=True):
                    inside = segment.plan.prefill
                    inside = inside[(inside >= start) & (inside < stop)]
                    self._add(segment, PREFILL, inside, states[inside - start])
                progress(stop - start)
            # The class writes into its cache in place.
            prefix = copy.deepcopy(cache) if any(plan.rescore for plan in plans) else None
            for at in range(context_len, last):
                hidden = self._hidden(ids[:, at : at + 1], cache)
                logits = _float32(self._model.lm_head(hidden)[:, -1])
                for segment, own in zip(segments, logits, strict=True):
                    segment.add(DECODE, [at], own[None], self._score_rows)
                progress(1)
            if prefix is not None:
                hidden = self._hidden(ids[:, context_len:last], prefix)
                positions = range(context_len, last)
                for segment, states in zip(segments, hidden, strict=True):
                    if segment.plan.rescore:
                        self._add(segment, RESCORE, positions, states)
        return [segment.rows() for segment in segments]

    def _hidden(self, ids: torch.Tensor, cache: Any) -> torch.Tensor:
        """[B, T, D] after the final norm; logits are made only where they are scored."""
        return self._model.base_model(ids, cache=cache, use_cache=True).last_hidden_state

    def _add(self, segment: _Segment, phase: int, positions: Any, states: torch.Tensor) -> None:
        if len(positions):
            logits = _float32(self._model.lm_head(states))
            segment.add(phase, positions, logits, self._score_rows)


@dataclasses.dataclass
class _Segment:
    """One segment's rows while they come in, in row order."""

    tokens: np.ndarray
    plan: RowPlan
    pieces: list[dict[str, np.ndarray]] = dataclasses.field(default_factory=list)
    count: int = 0

    def add(self, phase: int, positions: Any, logits: np.ndarray, score: Callable) -> None:
        """Rows at `positions` from logits float32 [rows, vocab]."""
        import numpy as np

        pos = np.asarray(positions, np.int32)
        top_ids = self.plan.top_ids
        if top_ids is not None:
            top_ids = top_ids[self.count : self.count + len(pos)]
        scored = score(logits, self.tokens[pos + 1], top_ids)
        rows = {"pos": pos, "phase": np.full(len(pos), phase, np.uint8)}
        self.pieces.append(rows | {name: np.asarray(x) for name, x in scored.items()})
        self.count += len(pos)

    def rows(self) -> dict[str, np.ndarray]:
        import numpy as np

        names = self.pieces[0]
        return {name: np.concatenate([piece[name] for piece in self.pieces]) for name in names}


def _dtype_of(policy: Policy) -> str:
    from kernjax.precision import parse_policy

    for name, dtype in _DTYPES.items():
        known = parse_policy(name)
        if dataclasses.replace(policy, prefill_window=known.prefill_window) == known:
            return dtype
    raise UserError(
        f"--engine=transformers cannot run policy {policy}.",
        f"The vendor's code rounds where it rounds: {', '.join(_DTYPES)}, with a prefill_window.",
        "Use --engine=jax for anything else.",
    )


def _check_installed() -> None:
    try:
        import torch  # noqa: F401
        import transformers
    except ImportError as error:
        raise UserError(
            f"--engine=transformers: {error}.",
            "torch and transformers are an extra of this package.",
            "pip install 'kernjax[transformers]'",
        ) from None
    major, minor = (int(part) for part in transformers.__version__.split(".")[:2])
    if (major, minor) < _OLDEST:
        raise UserError(
            f"transformers {transformers.__version__} is too old for --engine=transformers.",
            f"Expected {'.'.join(map(str, _OLDEST))} or newer.",
            "pip install -U 'kernjax[transformers]'",
        )


def _check_class(directory: Path, config: ModelConfig) -> None:
    """UserError for what transformers has no class for, or would leave out of its computation."""
    if config.delta is not None and (config.block_size, config.delta.lower_bound) != (None, None):
        raise UserError(
            f"{directory} is a Kimi K3, for which transformers has no class.",
            "Expected a model that its own code computes.",
            "Record the reference with --engine=jax and --policy=f32.",
        )


def _load(directory: Path, dtype: str, attn_implementation: str) -> Any:
    """The checkpoint's own causal language model, on the device it runs on."""
    import torch
    import transformers

    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        directory,
        dtype=getattr(torch, dtype),
        attn_implementation=attn_implementation,
        local_files_only=True,
        output_loading_info=True,
    )
    if absent := sorted(report["missing_keys"]):
        raise UserError(
            f"transformers found no values for {', '.join(absent[:8])} in {directory}.",
            "It would run with random ones.",
        )
    # Matrix products are float32 by default, convolutions are not (TF32).
    torch.backends.cudnn.allow_tf32 = False
    return model.eval().to("cuda" if torch.cuda.is_available() else "cpu")


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _device_name(device: torch.device) -> str:
    import torch

    if device.type == "cuda":
        return f"torch {torch.cuda.get_device_name(device)}"
    # Reductions are split by the number of threads.
    return f"torch cpu x {torch.get_num_threads()}"


def _windows(length: int, window: int) -> Iterator[tuple[int, int]]:
    for start in range(0, length, window):
        yield start, min(start + window, length)


def _float32(x: torch.Tensor) -> np.ndarray:
    """On the host; exact, whatever the dtype of the model."""
    return x.float().cpu().numpy()
