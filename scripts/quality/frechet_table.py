"""Fill the table of Frechet distances in docs/benchmarks/frechet.md: every VAE and GAN over seeds in several modes.

Usage:
    nice -n 15 python scripts/quality/frechet_table.py --steps 300 --seeds 2     # all models of generative_table.py
    python scripts/quality/frechet_table.py --only vae lsgan --seeds 1 --modes fp32 amp

A cell is the mean of the distances after the training over seeds, with the standard deviation and the number of seeds.
A training is `mpt.build` and `mpt.update` in this process, so that short ones are not mostly imports; it has no
recoveries, and ends where a loss is not finite. A second table is the doctor's: what of a first step does not survive
float16, by its findings on numerics. The first seed of all comes first, so that the tables are complete after it.
Results stay in --work (one JSON line each) and are not computed again; the tables are written anew after each round,
and by --seeds 0 alone.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import mpt
from mpt.errors import MptError
from scripts.command_line import described
from scripts.quality.generative_table import PLAN, ROOT, Entry, stamp, write_between

DOCUMENT = ROOT / "docs" / "benchmarks" / "frechet.md"
MARKER = "table:frechet"
MODES: dict[str, tuple[str, ...]] = {
    "fp32": ("precision.mode=fp32",),
    "amp": ("precision.mode=amp", "precision.dtype=bfloat16"),
    "bf16-pure": ("precision.mode=bf16-pure",),
    "amp float16": ("precision.mode=amp", "precision.dtype=float16"),
    "O2 float16": ("precision.mode=O2", "precision.dtype=float16"),
    "fp16-24bit": ("precision.mode=fp16-24bit",),
    "native": ("precision.mode=native", "precision.dtype=bfloat16"),
}
FLOAT16 = ("amp float16", "O2 float16", "fp16-24bit")
SLOW = {"dcgan": 6, "stylegan2": 60}
"""Models of convolutions, and by what the number of steps is divided. On a CPU they are not trained in float16."""


def main() -> None:
    """Train and examine what is missing, and write the table after each round."""
    parser = described(__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--work", type=Path, default=Path("runs") / "frechet.jsonl")
    parser.add_argument("--only", nargs="*", default=[entry.name for entry in PLAN])
    parser.add_argument("--modes", nargs="*", default=list(MODES), choices=list(MODES))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--document", type=Path, default=DOCUMENT)
    arguments = parser.parse_args()
    for _ in rounds(arguments):
        write(arguments)
    write(arguments)


def rounds(arguments: Any) -> Iterator[None]:
    """Fill in a seed of all models and modes at a time, and the doctor's findings after the first."""
    entries = [entry for entry in PLAN if entry.name in arguments.only]
    known = {
        (one["model"], one["mode"], one["seed"], one["steps"]) for one in results(arguments.work)
    }
    for seed in range(arguments.seeds):
        for entry in entries:
            for mode in modes_of(entry, arguments.modes, arguments.device):
                if (entry.name, mode, seed, steps_of(entry, arguments)) not in known:
                    keep(arguments.work, trained(entry, mode, seed, arguments))
        yield
        if seed == 0:
            for entry in entries:
                if (entry.name, "doctor", 0, 0) not in known:
                    keep(arguments.work, examined(entry, arguments))
            yield


def modes_of(entry: Entry, wanted: list[str], device: str) -> list[str]:
    """Return the modes that a model is trained in: `native` is StyleGAN2's own."""
    return [
        mode
        for mode in wanted
        if (mode != "native" or entry.name == "stylegan2")
        and not (mode in FLOAT16 and entry.name in SLOW and device == "cpu")
    ]


def steps_of(entry: Entry, arguments: Any) -> int:
    """Return the number of steps that a model is trained for."""
    return int(arguments.steps // SLOW.get(entry.name, 1))


def trained(entry: Entry, mode: str, seed: int, arguments: Any) -> dict[str, Any]:
    """Train once and return the result."""
    steps = steps_of(entry, arguments)
    given = (
        f"train.steps={steps}",
        f"seed={seed}",
        f"train.device={arguments.device}",
        "train.threads=1",
    )
    result: dict[str, Any] = {"model": entry.name, "mode": mode, "seed": seed, "steps": steps}
    try:
        built = mpt.build(mpt.load(f"@{entry.config}", *entry.changes, *MODES[mode], *given))
    except MptError as error:
        return {**result, "refused": str(error)}
    skipped = 0
    for step, batch in zip(range(steps), built.batches(), strict=False):
        updates = mpt.update(built, batch, step)
        skipped += sum(bool(one.stats.skipped) for one in updates.values())
        if not all(one.finite for one in updates.values()):
            return {**result, "broke": step}
    return {**result, "distance": built.evaluate()["frechet_distance"], "skipped": skipped}


def examined(entry: Entry, arguments: Any) -> dict[str, Any]:
    """Return the doctor's findings on float16."""
    config = mpt.load(
        f"@{entry.config}", *entry.changes, f"train.device={arguments.device}", "train.threads=1"
    )
    sections = mpt.doctor(config, only=("numerics",), dtype="float16")
    found = [
        one for section in sections for one in section.findings if one.level in ("warning", "fault")
    ]
    text = "; ".join(f"{one.about}: {one.text}" for one in found[:3])
    return {"model": entry.name, "mode": "doctor", "seed": 0, "steps": 0, "text": text or "nothing"}


def keep(path: Path, result: dict[str, Any]) -> None:
    """Append a result."""
    print(json.dumps(result), flush=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(result) + "\n")


def results(path: Path) -> list[dict[str, Any]]:
    """Return all results."""
    return (
        [json.loads(line) for line in path.read_text("utf-8").splitlines()]
        if path.is_file()
        else []
    )


def write(arguments: Any) -> None:
    """Write the table of all results of this number of steps."""
    found = results(arguments.work)
    seeds = 1 + max((one["seed"] for one in found), default=0)
    command = f"python scripts/quality/frechet_table.py --steps {arguments.steps} --seeds {seeds}"
    lines = [
        stamp(command, arguments.device),
        "",
        "| Model | Steps | " + " | ".join(MODES) + " |",
        "|---|---:|" + "---:|" * len(MODES),
    ]
    for entry in PLAN:
        own = [
            one
            for one in found
            if one["model"] == entry.name and one["steps"] == steps_of(entry, arguments)
        ]
        if own:
            cells = [shown([one for one in own if one["mode"] == mode]) for mode in MODES]
            lines.append(
                f"| {entry.name} | {steps_of(entry, arguments):,} | " + " | ".join(cells) + " |"
            )
    said = {one["model"]: one["text"].replace("|", "/") for one in found if one["mode"] == "doctor"}
    refused = {
        (one["mode"], one["refused"]): one["model"]
        for one in found
        if "refused" in one and one["mode"] in MODES
    }
    if said:
        lines += [
            "",
            "| Model | Not in float16, by `mpt doctor CONFIG --only numerics --dtype float16` |",
            "|---|---|",
        ]
    lines += [f"| {entry.name} | {said[entry.name]} |" for entry in PLAN if entry.name in said]
    lines += [f"\nRefused: {model} in {mode}: {text}" for (mode, text), model in refused.items()]
    write_between(arguments.document, MARKER, lines)


def shown(found: list[dict[str, Any]]) -> str:
    """Return mean, deviation and number of seeds, or why there is none."""
    if not found:
        return "-"
    if any("refused" in one for one in found):
        return "refused"
    broke = [one for one in found if "broke" in one]
    if broke:
        return f"not finite in {len(broke)} of {len(found)}, first at step {min(one['broke'] for one in broke)}"
    values = [one["distance"] for one in found]
    spread = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    skipped = statistics.mean(one["skipped"] for one in found)
    return f"{statistics.mean(values):.2f}{spread} ({len(values)})" + (
        f", {skipped:.0f} skipped" if skipped else ""
    )


if __name__ == "__main__":
    main()
