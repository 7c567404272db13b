"""What tracking costs a run, as a share of the processor time of the same run without it.

    python benchmarks/tracking.py [--repeats 5] [OVERRIDES ...]
    python benchmarks/tracking.py data=fashion_mnist fl.num_clients=20

Both kinds of run alternate in one process, after one of each that is not counted: it loads MLflow and creates the
database. Processor time of this process and its children, user and system, the median of the pairs' differences.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile

from fl_lightning import load_config, run

LOADING = (
    "import time; import torch; from fl_lightning.tracking import connect, resolve_uri; began = time.process_time()"
)
CONNECTING = "connect(resolve_uri()); print(time.process_time() - began)"


def processor_seconds(overrides: list[str]) -> float:
    config = load_config(overrides)
    began = sum(os.times()[:4])
    run(config)
    return sum(os.times()[:4]) - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("overrides", nargs="*", help="of the run; 20 rounds if not given")
    arguments = parser.parse_args()
    overrides = ["fl.rounds=20", *arguments.overrides]
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        pairs = []
        for number in range(arguments.repeats + 1):
            pair = tuple(processor_seconds([*overrides, f"tracking.enabled={on}"]) for on in ("false", "true"))
            pairs += [pair] if number else []
        loading = [sys.executable, "-c", f"{LOADING}; {CONNECTING}"]
        once = float(subprocess.run(loading, capture_output=True, text=True, check=True).stdout)
        os.chdir("/")
    bare = statistics.median(without for without, _ in pairs)
    added = statistics.median(tracked - without for without, tracked in pairs)
    spread = sorted(tracked - without for without, tracked in pairs)
    print(f"without tracking {bare:.2f} s, tracking adds {added:.3f} s ({spread[0]:.3f} to {spread[-1]:.3f}): ", end="")
    print(f"{added / bare:.1%} of the run")
    print(f"once per process, loading MLflow and opening the store: {once:.2f} s")


if __name__ == "__main__":
    main()
