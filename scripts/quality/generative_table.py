"""Fill the tables of docs/benchmarks/generative.md: every model in several precision modes, by `mpt compare`.

Usage:
    python scripts/quality/generative_table.py              # CPU, the shipped configs and variants; an hour on one core
    python scripts/quality/generative_table.py --device cuda  # the GPU's table
    python scripts/quality/generative_table.py --only vae lsgan  # these rows again, the others as they are

Each row of the plan is one `mpt compare`: the same config, seeds and data order under each mode, each run a process of
its own. Nothing is computed here; the script lays out what the comparisons wrote, which stay below --work and are gone
on with after an interruption. The tables stand between markers in the document; a row without a comparison below
--work stays as it is.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from scripts.command_line import described
from scripts.provenance import made

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs" / "benchmarks" / "generative.md"
COMMAND = [sys.executable, "-c", "from mpt.cli import main; main()"]


@dataclass(frozen=True)
class Entry:
    """One comparison: a config, what is changed in it, the modes and how many seeds."""

    name: str
    config: str
    modes: tuple[str, ...] = ("fp32", "amp")
    seeds: int = 3
    changes: tuple[str, ...] = ()


SHORT = ("train.steps=3000", "train.evaluate_every=0", "train.sample_every=0")
PLAN = (
    Entry("vae", "vae", ("fp32", "amp", "O1", "O2", "bf16-pure")),
    Entry("lsgan", "lsgan", ("fp32", "amp", "O1")),
    Entry("wgan_gp", "wgan_gp", ("fp32", "amp", "O1")),
    Entry("dcgan", "dcgan_fp32"),
    Entry("vanilla_gan", "lsgan", changes=("model.name=vanilla_gan", *SHORT)),
    Entry(
        "wgan",
        "lsgan",
        changes=(
            "model.name=wgan",
            "task.critic_steps=5",
            "optimizer=null",
            "optimizer={name: rmsprop, lr: 1.0e-3}",
            "train.steps=6000",
        ),
    ),
    Entry("cgan", "lsgan", changes=("model.name=cgan", *SHORT)),
    Entry("acgan", "lsgan", changes=("model.name=acgan", *SHORT)),
    Entry("infogan", "lsgan", changes=("model.name=infogan", *SHORT)),
    Entry("began", "began"),
    Entry("ebgan", "lsgan", changes=("model.name=ebgan", "optimizer.betas=[0.5, 0.9]", *SHORT)),
    Entry("aae", "lsgan", changes=("model.name=aae", *SHORT)),
    Entry(
        "bigan",
        "lsgan",
        changes=(
            "model.name=bigan",
            "task.objective=wasserstein",
            "task.gradient_penalty=10",
            "task.critic_steps=3",
            "train.steps=6000",
        ),
    ),
    Entry("cvae", "vae", changes=("model.name=cvae",)),
    Entry("dvae", "vae", changes=("model.name=dvae",)),
    Entry("stylegan2", "stylegan2_16", ("fp32", "amp", "native")),
)
HEAD = (
    "| Model | Mode | Peak bytes | Step | Figure, final | Skipped | Verdict |",
    "|---|---|---:|---:|---:|---:|---|",
)
MARGIN = {"negative_elbo": "2%", "frechet_distance": "50%"}


def main() -> None:
    """Run the plan and rewrite the table of the device."""
    parser = described(__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--work", type=Path, default=Path("runs") / "generative")
    parser.add_argument("--only", nargs="*", default=[entry.name for entry in PLAN])
    parser.add_argument("--document", type=Path, default=DOCUMENT)
    arguments = parser.parse_args()
    kind = arguments.device.split(":")[0]
    for entry in PLAN:
        if entry.name in arguments.only:
            print(f"{entry.name}: {', '.join(entry.modes)}, {entry.seeds} seed(s)", flush=True)
            compare(entry, arguments.work / kind, arguments.device)
    old = read_rows(arguments.document, f"table:{kind}")
    lines = list(HEAD)
    for entry in PLAN:
        comparison = read(entry, arguments.work / kind)
        lines += old.get(entry.name, []) if comparison is None else rows(entry, comparison)
    write_between(arguments.document, f"table:{kind}", lines)


def compare(entry: Entry, work: Path, device: str) -> None:
    """Run one comparison; what fails is said and leaves its row out."""
    margin = MARGIN["negative_elbo" if entry.config == "vae" else "frechet_distance"]
    words = [*COMMAND, "compare", *entry.modes, "--config", f"@{entry.config}"]
    words += [
        "--seeds",
        str(entry.seeds),
        "--margin",
        margin,
        "--runs",
        str(work),
        "--name",
        entry.name,
    ]
    words += ["--device", device, "--quiet", *entry.changes]
    if device == "cpu":
        words.append("train.threads=1")
    finished = subprocess.run(words, capture_output=True, text=True)
    if finished.returncode:
        print(
            f"{entry.name}: exit {finished.returncode}: {finished.stderr.strip()[-400:]}",
            flush=True,
        )


def read(entry: Entry, work: Path) -> dict[str, Any] | None:
    """Return what the comparison wrote, or None where there is none."""
    paths = sorted(work.glob(f"**/{entry.name}/comparison.json"))
    return json.loads(paths[-1].read_text("utf-8")) if paths else None


def rows(entry: Entry, comparison: dict[str, Any]) -> list[str]:
    """Return an entry's rows of the Markdown table, one per mode."""
    return ["| " + " | ".join(cells(entry, comparison, row)) + " |" for row in comparison["modes"]]


def read_rows(document: Path, marker: str) -> dict[str, list[str]]:
    """Return the rows that stand in the document, by the name in the first cell of each one's first row."""
    found: dict[str, list[str]] = {}
    name = ""
    for line in between(document, marker)[1].strip().splitlines()[len(HEAD) :]:
        name = line.split("|")[1].strip() or name
        found.setdefault(name, []).append(line)
    return found


def cells(entry: Entry, comparison: dict[str, Any], row: dict[str, Any]) -> list[str]:
    """Return one row's cells."""
    final, verdict = row["final"], row["verdict"]
    figure = "diverged" if final["mean"] is None else f"{final['mean']:.2f}"
    if entry.seeds > 1 and final["mean"] is not None and final["deviation"] is not None:
        figure += f" ± {final['deviation']:.2f}"
    unit = "-ELBO" if comparison["metric"] == "negative_elbo" else "FD"
    mode = row["mode"] if row["dtype"] in (None, "float32") else f"{row['mode']} ({row['dtype']})"
    said = (
        "baseline"
        if row["mode"] == comparison["baseline"]
        else (verdict or {}).get("outcome", "one seed")
    )
    ratio = "" if row["mode"] == comparison["baseline"] else f" (×{row['peak_ratio']:.2f})"
    speed = "" if row["mode"] == comparison["baseline"] else f" (×{row['step_ratio']:.2f})"
    return [
        entry.name if row["mode"] == comparison["baseline"] else "",
        mode,
        f"{row['peak_bytes']:,.0f}{ratio}",
        f"{row['step_seconds'] * 1e3:.2f} ms{speed}",
        f"{unit} {figure}",
        str(row["skipped"]),
        said,
    ]


def stamp(command: str, device: str = "CPU") -> str:
    """Return a line with command, date and machine."""
    import torch

    return f"`{command}`, {made()}, {device} ({platform.machine()}, one thread), torch {torch.__version__}."


def between(document: Path, marker: str) -> tuple[str, str, str]:
    """Return the document before, between and after `<!-- marker -->` and the next `<!-- end -->`."""
    before, rest = document.read_text("utf-8").split(f"<!-- {marker} -->", 1)
    inside, after = rest.split("<!-- end -->", 1)
    return before, inside, after


def write_between(document: Path, marker: str, lines: list[str]) -> None:
    """Replace what stands between `<!-- marker -->` and `<!-- end -->`."""
    before, _, after = between(document, marker)
    text = f"{before}<!-- {marker} -->\n" + "\n".join(lines) + f"\n<!-- end -->{after}"
    document.write_text(text, "utf-8")


if __name__ == "__main__":
    main()
