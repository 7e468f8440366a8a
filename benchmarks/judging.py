"""How long a verdict takes once two recordings are there, and what a position costs on disk.

  python benchmarks/judging.py [--corpus=demo]

Reads the bundled reference, one normal recording and the band; no jax is imported.
"""

from __future__ import annotations

import argparse
import sys
import time

import kernjax
from kernjax.base.resources import demo_recording
from kernjax.judge import Band


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--corpus", default="demo")
    parser.add_argument("--candidate", default="bf16", help="a bundled normal recording")
    args = parser.parse_args()
    paths = [demo_recording(f"{args.corpus}.{name}.zip") for name in ("f32", args.candidate)]
    times = [time.perf_counter()]
    reference, candidate = (kernjax.load_recording(path) for path in paths)
    times.append(time.perf_counter())
    band = Band.load(demo_recording(f"{args.corpus}.band.json"))
    comparison = kernjax.compare(reference, candidate)
    times.append(time.perf_counter())
    verdict = kernjax.judge(comparison, band)
    times.append(time.perf_counter())
    load, compare, judge = (after - before for before, after in zip(times, times[1:], strict=False))
    positions = len(reference.pos)
    print(
        f"{positions:,} positions, {verdict.outcome}: load {load:.2f} s, compare {compare:.2f} s,"
        f" judge {judge:.2f} s; {paths[1].stat().st_size / positions:.0f} bytes a position;"
        f" jax imported: {'jax' in sys.modules}"
    )


if __name__ == "__main__":
    main()
