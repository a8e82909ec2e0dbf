"""Measures diagnosed.json again: what `diagnose` sees in full runs, which take too long for a test.

    rankone reproduce all --out REPRODUCTION
    python tests/measure_diagnosed.py REPRODUCTION

To be run whenever diagnose.py measures something else than before.
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rankone.diagnose import diagnose
from rankone.runs.run import load_run

RUNS = (
    "resid_mlp1-tuned-seed0-beta3-1e-07",
    "resid_mlp1-tuned-seed0-beta3-1e-06",
    "resid_mlp1-tuned-seed0",
    "resid_mlp1-tuned-seed0-beta3-0.0001",
    "resid_mlp1-tuned-seed0-beta3-0.001",
    "resid_mlp2-tuned-seed0",
    "tms_40-10-tuned-seed1",
    "tms_40-10-id-tuned-seed1",
    "tms_40-10-id-tuned-seed0-C-4x",
)


def measured(directory: Path) -> dict[str, Any]:
    run = load_run(directory)
    data = run.config.target.data(run.config.batch_size)
    return asdict(diagnose(run.result, data, steps_done=run.steps).numbers)


def rounded(value: Any) -> Any:
    """With four significant digits, which are stable and short."""
    if isinstance(value, dict):
        return {key: rounded(part) for key, part in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value


if __name__ == "__main__":
    numbers = {name: rounded(measured(Path(sys.argv[1]) / "work" / name)) for name in RUNS}
    Path(__file__).with_name("diagnosed.json").write_text(json.dumps(numbers, indent=1) + "\n")
