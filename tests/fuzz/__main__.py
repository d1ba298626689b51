# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Runs the passes on many random programs: `python -m tests.fuzz --programs 10000 --seed 1`.

Prints the number of programs, their seeds, what was compared and each difference, shrunk. The exit
code is 1 if there is any.
"""

import argparse
import os
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("NPROC", "1")  # threads of XLA in each process

from tests.fuzz.runner import CHUNK, run_chunk


def _arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m tests.fuzz", description=__doc__)
    parser.add_argument("--programs", type=int, default=1000, help="how many programs")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--processes", type=int, default=1, help="processes, each on one core")
    parser.add_argument("--jit-every", type=int, default=20, help="compile every n-th; 0: none")
    parser.add_argument("--no-shrink", action="store_true", help="show differences as found")
    parser.add_argument("--x64", action="store_true", help="with 64-bit numbers too")
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    """Runs the programs and prints what came out; returns the exit code."""
    args = _arguments(argv)
    chunks = -(-args.programs // CHUNK)
    seeds = range(args.seed, args.seed + chunks)
    start, counts, differences = time.perf_counter(), Counter[str](), []
    options = {"jit_every": args.jit_every, "shrink": not args.no_shrink, "x64": args.x64}
    with ProcessPoolExecutor(args.processes, get_context("spawn")) as pool:
        jobs = {}
        for i, seed in enumerate(seeds):
            size = min(CHUNK, args.programs - i * CHUNK)
            jobs[pool.submit(run_chunk, seed, size, **options)] = seed
        for done, job in enumerate(as_completed(jobs), 1):
            found, difference = job.result()
            counts.update(found)
            if difference is not None:
                differences.append(jobs[job])
                print(f"\n== difference, seed {jobs[job]} ==\n{difference}\n", flush=True)
            if done % 10 == 0 or done == chunks:
                seconds = time.perf_counter() - start
                print(f"{counts['programs']} programs, {seconds:.0f} s", file=sys.stderr)
    seconds, each = time.perf_counter() - start, counts.pop("CPU ms") / max(counts["programs"], 1)
    print(
        f"{counts['programs']} programs, seeds {seeds[0]}..{seeds[-1]}, {seconds:.0f} s, ", end=""
    )
    print(f"{args.processes} processes, {each:.0f} ms of a core each; ", end="")
    print(f"{len(differences)} differences: seeds {differences}")
    for what, count in sorted(counts.items()):
        print(f"  {count:7} {what}")
    return bool(differences)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
