"""How much a sweep costs beyond its trials: eight trials of one core, as a ratio to the ideal time from one alone.

    python benchmarks/sweep.py [--trials 8] [--rounds 60] [--cores 2]

The ideal is trials / cores times what one trial takes by itself: `fl-lightning run` as a process of its own, from its
start to its end, with all imports and its tracking. The sweep is `fl-lightning sweep`, measured in the same way, on as
many cores. Run it on a machine that does nothing else.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path


def seconds(arguments: Sequence[str], folder: Path) -> float:
    """Wall-clock seconds of one command line of the product, from start to end."""
    began = time.perf_counter()
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "fl_lightning.cli", *arguments]
    subprocess.run(command, cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--cores", type=int, default=min(2, os.cpu_count() or 1))
    asked = parser.parse_args()
    base = ["algorithm=fedsam", "partition=dirichlet", f"fl.rounds={asked.rounds}"]
    seeds = list(range(1, asked.trials + 1))
    with tempfile.TemporaryDirectory(prefix="fl-") as name:
        folder = Path(name)
        (folder / "eight.yaml").write_text(
            json.dumps({"seeds": seeds, "space": {"algorithm.local.rho": {"grid": [0.05]}}})
        )
        alone = seconds(["run", *base, "algorithm.local.rho=0.05", "seed=1"], folder)
        limit = f"sweep.max_concurrent={asked.cores}"
        whole = seconds(["sweep", "sweep=eight.yaml", *base, limit, "--quiet"], folder)
    ideal = math.ceil(asked.trials / asked.cores) * alone
    print(f"one trial alone      {alone:8.1f} s")
    print(f"{asked.trials} trials, {asked.cores} at a time {whole:8.1f} s")
    print(f"ideal                {ideal:8.1f} s")
    print(f"ratio                {whole / ideal:8.3f}   (goal: at most 1.15)")


if __name__ == "__main__":
    main()
