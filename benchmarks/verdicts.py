"""Is the verdict right? Decomposes networks with known mechanisms and compares what the verdict says,
which does not know them, with what the judge says, which does.

    python benchmarks/verdicts.py --half develop --seeds 0 1 --out runs/verdicts.jsonl
    python benchmarks/verdicts.py --out runs/verdicts.jsonl --only-table

Settings may be changed as key=value: results that are wrong on purpose belong to a calibration, too.
"""

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path

import torch

from rankone.collection.base import network
from rankone.collection.bench import Rankone
from rankone.collection.judge import judge
from rankone.collection.split import names_in
from rankone.decomposition import decompose
from rankone.diagnose import diagnose
from rankone.errors import RankoneError
from rankone.findings import Numbers, findings


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("settings", nargs="*", help="key=value")
    parser.add_argument("--half", default="develop")
    parser.add_argument("--only", nargs="+")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--out", type=Path, default=Path("runs/verdicts.jsonl"))
    parser.add_argument("--only-table", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = (
        [json.loads(line) for line in arguments.out.read_text().splitlines()]
        if arguments.out.exists()
        else []
    )
    done = {(row["name"], row["seed"], tuple(row["settings"])) for row in rows}
    if not arguments.only_table:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        for name in arguments.only or names_in(arguments.half):
            for seed in arguments.seeds:
                if (name, seed, tuple(arguments.settings)) not in done:
                    row = measured(name, seed, arguments.settings)
                    rows.append(row)
                    with arguments.out.open("a") as file:
                        file.write(json.dumps(row) + "\n")
                    print(in_words(row), flush=True)
    table(rows)


def measured(name: str, seed: int, settings: list[str]) -> dict:
    known = network(name)
    began = time.monotonic()
    config = Rankone(tuple(settings)).config(seed, known.tied, known.divergence)
    row = {"name": name, "seed": seed, "settings": settings}
    try:
        result = decompose(known.model, known.data, known.layers, config, output=known.output)
    except RankoneError as error:
        return row | {"recovered": False, "errors": None, "message": str(error), "numbers": None}
    seconds = time.monotonic() - began
    judgement = judge(known, result).to_dict()
    numbers = asdict(diagnose(result, known.data).numbers)
    return row | {
        "recovered": judgement["recovered"],
        "errors": judgement["errors"],
        "kinds": {kind: judgement[kind] for kind in ("missing", "stray", "split", "merged")},
        "cosine": judgement["cosine"],
        "l0": [judgement["l0"], judgement["true_l0"]],
        "shares": judgement["shares"],
        "seconds": round(seconds, 1),
        "numbers": numbers,
    }


def said(row: dict) -> list[str]:
    """The names of what the verdict finds wrong."""
    if row["numbers"] is None:
        return ["refused"]
    return [finding.name for finding in findings(Numbers.from_dict(row["numbers"]))]


def in_words(row: dict) -> str:
    right = "right" if row["recovered"] else f"wrong, {row['errors']} errors {row.get('kinds', '')}"
    return f"{row['name']} seed {row['seed']}: {right}; said: {', '.join(said(row)) or 'good'}"


def table(rows: list[dict]) -> None:
    for row in rows:
        print(in_words(row))
    good = [row for row in rows if not said(row)]
    wrong = [row for row in rows if not row["recovered"]]
    right_of_good = sum(row["recovered"] for row in good)
    called = sum(bool(said(row)) for row in wrong)
    print(f"{len(rows)} results, {len(rows) - len(wrong)} right.")
    print(
        f"Of {len(good)} called good, {right_of_good} are right. Of {len(wrong)} wrong, {called} are called so."
    )


if __name__ == "__main__":
    main()
