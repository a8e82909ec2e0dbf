"""Keep the results of finished runs in results/: summary and settings of each, figures of the first seed, one table.

    python benchmarks/collect_results.py runs/*

The table in results/README.md is made from every summary that results/ holds, so it never says what no run has shown.
"""

import argparse
import json
import shutil
import statistics
from collections import defaultdict
from pathlib import Path

from rankone.checkpoint import read_json
from rankone.experiments import experiment_config, experiment_names
from rankone.metrics import wilson

RESULTS = Path(__file__).resolve().parent.parent / "results"
HEADER = """# Results

Made by `python benchmarks/collect_results.py runs/*` from finished runs. Each folder holds a run's `summary.json`, its complete `config.yaml`, the
decomposition itself, and for the first seed the figures. Each run is repeated by `rankone run NAME --preset PRESET --seed N`.

*Recovered* means no error in any recovery check, with its Wilson 95 % interval. MMCS and ML2R (mean and standard deviation over seeds) are over
alive subcomponents of W; the paper's values are from its Table 1.
"""


def keep(run: Path) -> None:
    """Copy what is worth keeping of one run; runs that are not a preset as it stands are passed over."""
    summary = read_json(run / "summary.json")
    if summary["overrides"] or summary["preset"] == "custom":
        print(f"{run} is passed over: it is not a preset as it stands ({', '.join(summary['overrides'])})")
        return
    kept = RESULTS / f"{summary['experiment']}-{summary['preset']}-seed{summary['seed']}"
    shutil.rmtree(kept, ignore_errors=True)
    kept.mkdir(parents=True)
    for name in ("summary.json", "config.yaml"):
        shutil.copy(run / name, kept / name)
    shutil.copytree(run / "decomposition", kept / "decomposition", ignore=shutil.ignore_patterns("history.jsonl"))
    if summary["seed"] == 0:
        shutil.copytree(run / "figures", kept / "figures")


def spread(values: list[float]) -> str:
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.mean(values):.3f} ± {deviation:.3f}"


def table() -> str:
    groups: dict[tuple[str, str], list[dict]] = defaultdict(list)
    for path in sorted(RESULTS.glob("*/summary.json")):
        summary = json.loads(path.read_text())
        groups[summary["experiment"], summary["preset"]].append(summary)
    lines = [
        "| experiment | preset | steps | recovered | MMCS | paper | ML2R | paper |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in experiment_names():
        paper = experiment_config(name).paper_reports
        for preset in ("paper", "default"):
            runs = groups.get((name, preset), [])
            if not runs:
                continue
            good = sum(run["recovered"] for run in runs)
            low, high = wilson(good, len(runs))
            lines.append(
                f"| `{name}` | {preset} | {runs[0]['steps']:,} | **{good} of {len(runs)}** ({low:.0%} to {high:.0%}) "
                f"| {spread([r['mmcs'] for r in runs])} | {paper['mmcs']:.3f} | {spread([r['ml2r'] for r in runs])} | {paper['ml2r']:.3f} |"
            )
    return "\n".join(lines)


def every_run() -> str:
    lines = [
        "| run | recovered | errors per matrix | alive | MMCS | ML2R | training s |",
        "|---|---|---|---|---|---|---|",
    ]
    for path in sorted(RESULTS.glob("*/summary.json")):
        s = json.loads(path.read_text())
        errors = ", ".join(f"{name} {check['errors']}" for name, check in s["checks"].items())
        alive = ", ".join(str(n) for n in s["n_alive"].values())
        seconds = s["ms_per_step"] * s["steps"] / 1000
        lines.append(
            f"| [{path.parent.name}]({path.parent.name}/summary.json) | {'yes' if s['recovered'] else 'no'} | {errors} | {alive} "
            f"| {s['mmcs']:.4f} | {s['ml2r']:.4f} | {seconds:.0f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "runs", type=Path, nargs="*", help="run directories; those without a summary.json are passed over"
    )
    for run in parser.parse_args().runs:
        if (run / "summary.json").is_file():
            keep(run)
    RESULTS.mkdir(exist_ok=True)
    text = f"{HEADER}\n{table()}\n\n## Every run\n\nTimes are of one thread, two runs at a time on two cores.\n\n{every_run()}\n"
    (RESULTS / "README.md").write_text(text)
    print(table())


if __name__ == "__main__":
    main()
