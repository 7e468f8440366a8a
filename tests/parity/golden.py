"""Checkpoints and the vendor's traces of them as small .npz files, for machines without torch.

One file a case: the checkpoint itself (bfloat16 bits), the tokens, the vendor's float32 trace, and
its logits and hidden states in bfloat16 (eager; sdpa's logits too).
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import ml_dtypes
import numpy as np

from .checkpoints import Case, write
from .trace import PARTS, Cached, Trace

FOLDER = Path(__file__).parent / "golden"


@dataclasses.dataclass(frozen=True)
class Golden:
    """What one file holds. `versions` are those of torch and transformers that made it."""

    tensors: dict[str, np.ndarray]
    tokens: np.ndarray
    f32: Trace
    bf16_logits: np.ndarray
    bf16_hidden: np.ndarray
    sdpa_logits: np.ndarray
    versions: dict[str, str]

    def write_checkpoint(self, case: Case, directory: Path) -> Path:
        return write(case, directory, self.tensors)


def path_of(case: Case) -> Path:
    return FOLDER / f"{case.name}.npz"


def save(case: Case, golden: Golden) -> None:
    arrays = {f"tensor/{name}": _bits(x) for name, x in golden.tensors.items()}
    arrays |= {"tokens": golden.tokens, "versions": np.array(json.dumps(golden.versions))}
    arrays |= {"f32/logits": golden.f32.logits, "f32/hidden": golden.f32.hidden}
    for when in ("after_prefill", "after_decode"):
        cached = getattr(golden.f32, when)
        arrays |= {f"f32/{when}/{part}": getattr(cached, part) for part in PARTS}
    for name in ("bf16_logits", "bf16_hidden", "sdpa_logits"):
        arrays[name] = _bits(getattr(golden, name))
    np.savez_compressed(path_of(case), **arrays)


def load(case: Case) -> Golden:
    with np.load(path_of(case)) as file:
        arrays = dict(file)
    cached = {
        when: Cached(**{part: arrays[f"f32/{when}/{part}"] for part in PARTS})
        for when in ("after_prefill", "after_decode")
    }
    return Golden(
        tensors={
            name.removeprefix("tensor/"): _floats(bits)
            for name, bits in arrays.items()
            if name.startswith("tensor/")
        },
        tokens=arrays["tokens"],
        f32=Trace(arrays["f32/logits"], arrays["f32/hidden"], **cached),
        bf16_logits=_floats(arrays["bf16_logits"]),
        bf16_hidden=_floats(arrays["bf16_hidden"]),
        sdpa_logits=_floats(arrays["sdpa_logits"]),
        versions=json.loads(str(arrays["versions"])),
    )


def _bits(x: np.ndarray) -> np.ndarray:
    """float32 rounded to bfloat16, as uint16: .npz does not know bfloat16."""
    return x.astype(ml_dtypes.bfloat16).view(np.uint16)


def _floats(bits: np.ndarray) -> np.ndarray:
    return bits.view(ml_dtypes.bfloat16).astype(np.float32)
