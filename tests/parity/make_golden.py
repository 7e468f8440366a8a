"""Makes tests/parity/golden/*.npz again from fixed seeds; needs torch and transformers.

Run from the repository's root as `python -m tests.parity.make_golden [CASE...]`.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
import transformers

from . import golden, vendor
from .checkpoints import GOLDEN_CASES, draw, write


def main() -> None:
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    for case in (case for case in GOLDEN_CASES if case.name in sys.argv[1:] or not sys.argv[1:]):
        tensors = draw(case)
        with tempfile.TemporaryDirectory() as folder:
            directory = write(case, Path(folder), tensors)
            runs = {
                (dtype, attention): vendor.run(
                    vendor.load(directory, dtype, attention), case.tokens, case.context_len
                )
                for dtype, attention in (
                    ("float32", "eager"),
                    ("bfloat16", "eager"),
                    ("bfloat16", "sdpa"),
                )
            }
        eager = runs["bfloat16", "eager"]
        golden.save(
            case,
            golden.Golden(
                tensors=tensors,
                tokens=case.tokens,
                f32=runs["float32", "eager"],
                bf16_logits=eager.logits,
                bf16_hidden=eager.hidden,
                sdpa_logits=runs["bfloat16", "sdpa"].logits,
                versions=versions,
            ),
        )
        print(f"{golden.path_of(case)}: {golden.path_of(case).stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
