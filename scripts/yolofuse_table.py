"""Fill the demo's table in docs/yolofuse.md: every fusion on the drawn scenes, and half against float32.

Usage:
    python scripts/yolofuse_table.py                   # CPU: eight short trainings and a comparison, half an hour
    python scripts/yolofuse_table.py --only mid early  # these rows again, the others as they are
    python scripts/yolofuse_table.py --read            # lay out what is below --work already

Each row is one `mpt train configs/yolofuse_demo.yaml` with another fusion, and the comparison one `mpt compare fp32
bf16`; nothing is computed here. The picture docs/pictures/yolofuse_detections.png is made of the run of mid.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "yolofuse.md"
PICTURE = ROOT / "docs" / "pictures" / "yolofuse_detections.png"
CONFIG = ROOT / "configs" / "yolofuse_demo.yaml"
COMMAND = [sys.executable, "-c", "from mpt.cli import main; main()"]
FUSIONS = ("rgb", "ir", "early", "mid", "decision", "easy", "deyolo", "defa")
PUBLISHED = {"rgb": ".891/.500", "mid": ".947/.601", "early": ".955/.623", "decision": ".955/.612", "easy": ".939/.620",
             "deyolo": ".952/.615"}  # fmt: skip
SHOWN_PAIRS = 6
HEAD = (
    "| Fusion (n) | Parameters | mAP50 | mAP50-95 | the article's way | ms per step | article, LLVIP |",
    "|---|---:|---:|---:|---:|---:|---:|",
)


def main() -> None:
    """Train what is asked for and rewrite the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("runs") / "yolofuse")
    parser.add_argument("--only", nargs="*", default=[*FUSIONS, "compare"])
    parser.add_argument("--read", action="store_true")
    parser.add_argument("--seeds", type=int, default=5)
    arguments = parser.parse_args()
    for name in () if arguments.read else arguments.only:
        print(name, flush=True)
        run(words_of(name, arguments.work, arguments.seeds))
    rows = {line.split("|")[1].strip(): line for line in between("table:fusions")[1].strip().splitlines()[2:]}
    for name in FUSIONS:
        if (arguments.work / name / "report.json").is_file():
            rows[name] = row(name, arguments.work / name)
    write_between("table:fusions", [*HEAD, *(rows[name] for name in FUSIONS if name in rows)])
    found = sorted(arguments.work.glob("**/comparison.json"))
    if found:
        write_between("table:half", comparison(json.loads(found[-1].read_text("utf-8"))))
    if (arguments.work / "mid" / "config.yaml").is_file():
        draw(arguments.work / "mid")


def words_of(name: str, work: Path, seeds: int) -> list[str]:
    """Return the command of one row."""
    if name == "compare":
        words = ["compare", "fp32", "bf16", "--config", str(CONFIG), "--seeds", str(seeds), "--name", "compare"]
        return [*words, "--runs", str(work), "--quiet"]
    cameras = [f"dataset.cameras={name}"] if name in ("rgb", "ir") else []
    words = ["train", str(CONFIG), f"model.fusion={name}", *cameras, "--name", name, "--runs", str(work), "--quiet"]
    return words


def run(words: list[str]) -> None:
    """Run a command; what fails is said and leaves its row as it was."""
    finished = subprocess.run([*COMMAND, *words], capture_output=True, text=True)
    if finished.returncode:
        print(f"exit {finished.returncode}: {finished.stderr.strip()[-400:]}", flush=True)


def row(name: str, folder: Path) -> str:
    """Return a fusion's row."""
    from mpt.report.read_run import read_run
    from mpt.systems.yolofuse.nn.yolofuse import Settings, YoloFuse

    record = read_run(folder)
    figures = record.figures
    parameters = sum(p.numel() for p in YoloFuse(Settings(fusion=name), 1).parameters())
    seconds = json.loads((folder / "report.json").read_text("utf-8"))["median_step_seconds"]
    cells = [
        name,
        f"{parameters:,}",
        f"{figures['map50']:.3f}",
        f"{figures['map50_95']:.3f}",
        f"{figures['map50_article']:.3f}/{figures['map50_95_article']:.3f}",
        f"{seconds * 1e3:.0f}",
        PUBLISHED.get(name, ""),
    ]
    return f"| {' | '.join(cells)} |"


def comparison(content: dict[str, Any]) -> list[str]:
    """Return the comparison's table."""
    lines = ["| Mode | mAP50 | Peak, MiB | ms per step | Verdict |", "|---|---:|---:|---:|---|"]
    for mode in content["modes"]:
        final, verdict = mode["final"], mode["verdict"]
        said = "baseline" if mode["mode"] == content["baseline"] else (verdict or {}).get("outcome", "one seed")
        spread = f" ± {final['deviation']:.4f}" if final["deviation"] is not None else ""
        lines.append(
            f"| {mode['mode']} | {final['mean']:.4f}{spread} | {mode['peak_bytes'] / 2**20:.1f} | "
            f"{mode['step_seconds'] * 1e3:.0f} | {said} |"
        )
    return lines


def draw(folder: Path) -> None:
    """Write the picture of a run's detections on test pairs."""
    import torch

    from mpt.data.images import write_grid
    from mpt.data.loader import to_device
    from mpt.engine.evaluation import preview
    from mpt.inference.trained import open_trained

    trained = open_trained(str(folder), folder.parent, "cpu")
    batch = trained.test_data.fetch(list(range(SHOWN_PAIRS)), 0)
    tiles = preview(trained.run, to_device(batch, torch.device("cpu"), trained.run.data))
    assert tiles is not None
    write_grid(tiles, PICTURE, 3)


def between(marker: str) -> tuple[str, str, str]:
    """Return the document before, between and after `<!-- marker -->` and the next `<!-- end -->`."""
    before, rest = DOCUMENT.read_text("utf-8").split(f"<!-- {marker} -->", 1)
    inside, after = rest.split("<!-- end -->", 1)
    return before, inside, after


def write_between(marker: str, lines: list[str]) -> None:
    """Replace what stands between `<!-- marker -->` and `<!-- end -->`."""
    before, _, after = between(marker)
    text = f"{before}<!-- {marker} -->\n" + "\n".join(lines) + f"\n<!-- end -->{after}"
    DOCUMENT.write_text(text, "utf-8")


if __name__ == "__main__":
    main()
