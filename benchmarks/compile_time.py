"""How long the kernels take to compile, and to load once they are compiled.

    python benchmarks/compile_time.py [--rounds 3]

Prints seconds from a first call of `kernels()` in a fresh process with an empty cache, and with a
full one. The load of the machine is printed with it: compiling wants two cores to itself.
"""

import argparse
import os
import subprocess
import sys
import tempfile

SCRIPT = """
import time, rankone.fast.compiled as compiled
start = time.perf_counter()
digest = compiled.kernels_digest()
print(time.perf_counter() - start, digest)
"""


def first_call(root: str) -> tuple[float, str]:
    environment = {**os.environ, "RANKONE_CACHE_DIR": root}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, check=True, stdout=subprocess.PIPE, text=True
    )
    seconds, digest = done.stdout.split()
    return float(seconds), digest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    digests = set()
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as root:
            (cold, first), (warm, second) = first_call(root), first_call(root)
        digests |= {first, second}
        print(f"cold {cold:5.1f} s   warm {warm:5.2f} s   load {os.getloadavg()[0]:.1f}", flush=True)
    print("the same bits every time" if len(digests) == 1 else f"DIFFERENT BITS: {sorted(digests)}")


if __name__ == "__main__":
    main()
