"""Fill the demo's table in docs/benchmarks/yolofuse.md: every fusion on the drawn scenes, and half against float32.

Usage:
    python scripts/quality/yolofuse_table.py                 # CPU: eight short trainings and a comparison, half an hour
    python scripts/quality/yolofuse_table.py --seeds 3       # each of them three times
    python scripts/quality/yolofuse_table.py --only mid early  # these rows again, the others as they are
    python scripts/quality/yolofuse_table.py --read          # lay out what is below --work already

Each row is `mpt train @yolofuse_demo` with another fusion, once per seed, and the comparison one `mpt
compare fp32 bf16` with five; beside the runs' figures stand the operations of a pair at 640 pixels, counted by torch.
The picture docs/pictures/yolofuse_detections.png is made of the run of mid with seed 0.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from scripts.command_line import described
from scripts.quality.generative_table import COMMAND, ROOT, between, write_between

DOCUMENT = ROOT / "docs" / "benchmarks" / "yolofuse.md"
PICTURE = ROOT / "docs" / "pictures" / "yolofuse_detections.png"
CONFIG = "@yolofuse_demo"
FUSIONS = ("rgb", "ir", "early", "mid", "decision", "easy", "deyolo", "defa")
PUBLISHED = {
    "rgb": ("8.1", ".891/.500"),
    "mid": ("3.2", ".947/.601"),
    "early": ("6.7", ".955/.623"),
    "decision": ("10.7", ".955/.612"),
    "easy": ("8.5", ".939/.620"),
    "deyolo": ("16.6", ".952/.615"),
}
"""GFLOPs at 640 pixels, and mAP50 / mAP50-95 on LLVIP."""
ARTICLES_WAY = ("map50_article", "map50_95_article")
SHOWN_PAIRS = 6
COMPARED_SEEDS = 5
SIDE = 640
HEAD = (
    "| Fusion (n) | Parameters | GFLOPs | mAP50 | mAP50-95 | the article's way | seeds | its GFLOPs | its LLVIP |",
    "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
)


def main() -> None:
    """Train what is asked for and rewrite the tables."""
    parser = described(__doc__)
    parser.add_argument("--work", type=Path, default=Path("runs") / "yolofuse")
    parser.add_argument("--only", nargs="*", default=[*FUSIONS, "compare"])
    parser.add_argument("--read", action="store_true")
    parser.add_argument("--seeds", type=int, default=1)
    arguments = parser.parse_args()
    for name in () if arguments.read else arguments.only:
        for words in commands_of(name, arguments.work, arguments.seeds):
            print(*words, flush=True)
            run(words)
    rows = {
        line.split("|")[1].strip(): line
        for line in between(DOCUMENT, "table:fusions")[1].strip().splitlines()[2:]
    }
    for name in FUSIONS:
        finished = sorted(path.parent for path in arguments.work.glob(f"{name}-seed*/summary.json"))
        if finished:
            rows[name] = row(name, finished)
    write_between(
        DOCUMENT, "table:fusions", [*HEAD, *(rows[name] for name in FUSIONS if name in rows)]
    )
    found = sorted(arguments.work.glob("**/comparison.json"))
    if found:
        write_between(DOCUMENT, "table:half", comparison(json.loads(found[-1].read_text("utf-8"))))
    if (arguments.work / "mid-seed0" / "config.yaml").is_file():
        draw(arguments.work / "mid-seed0")


def commands_of(name: str, work: Path, seeds: int) -> list[list[str]]:
    """Return the commands of one row."""
    where = ["--runs", str(work), "--quiet"]
    if name == "compare":
        compared = ["compare", "fp32", "bf16", "--config", CONFIG, "--seeds", str(COMPARED_SEEDS)]
        return [[*compared, "--name", "compare", *where]]
    cameras = [f"dataset.cameras={name}"] if name in ("rgb", "ir") else []
    words = ["train", CONFIG, f"model.fusion={name}", *cameras]
    return [
        [*words, "--seed", str(seed), "--name", f"{name}-seed{seed}", *where]
        for seed in range(seeds)
    ]


def run(words: list[str]) -> None:
    """Run a command; what fails is said and leaves its row as it was."""
    finished = subprocess.run([*COMMAND, *words], capture_output=True, text=True)
    if finished.returncode:
        print(f"exit {finished.returncode}: {finished.stderr.strip()[-400:]}", flush=True)


def row(name: str, folders: list[Path]) -> str:
    """Return a fusion's row: means over its runs, and their deviation where there are several."""
    from mpt.report.reading.read_run import read_run

    figures = [read_run(folder).figures for folder in folders]

    def mean(key: str) -> str:
        values = [one[key] for one in figures]
        spread = f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else ""
        return f"{statistics.fmean(values):.3f}{spread}"

    ways = "/".join(f"{statistics.fmean(one[key] for one in figures):.3f}" for key in ARTICLES_WAY)
    parameters, operations = size_of(name)
    published = PUBLISHED.get(name, ("", ""))
    sizes = (f"{parameters:,}", f"{operations / 1e9:.1f}")
    cells = [name, *sizes, mean("map50"), mean("map50_95"), ways, str(len(folders)), *published]
    return f"| {' | '.join(cells)} |"


def size_of(name: str) -> tuple[int, int]:
    """Return a fusion's parameters and the operations of one pair at 640 pixels, two per multiply-add."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from mpt.systems.yolofuse.nn.yolofuse import Settings, YoloFuse

    with torch.device("meta"):
        net = YoloFuse(Settings(fusion=name), 1).eval()
        shapes = {"rgb": (1, 3, SIDE, SIDE), "ir": (1, 1, SIDE, SIDE)}
        pictures = [torch.empty(shapes[camera]) for camera in net.cameras]
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        net(*pictures)
    return sum(p.numel() for p in net.parameters()), counter.get_total_flops()


def comparison(content: dict[str, Any]) -> list[str]:
    """Return the comparison's table."""
    lines = ["| Mode | mAP50 | Peak, MiB | ms per step | Verdict |", "|---|---:|---:|---:|---|"]
    for mode in content["modes"]:
        final, verdict = mode["final"], mode["verdict"]
        said = (
            "baseline"
            if mode["mode"] == content["baseline"]
            else (verdict or {}).get("outcome", "one seed")
        )
        spread = f" ± {final['deviation']:.4f}" if final["deviation"] is not None else ""
        lines.append(
            f"| {mode['mode']} | {final['mean']:.4f}{spread} | {mode['peak_bytes'] / 2**20:.1f} | "
            f"{mode['step_seconds'] * 1e3:.0f} | {said} |"
        )
    return lines


def draw(folder: Path) -> None:
    """Write the picture of a run's detections on test pairs."""
    import torch

    from mpt.data.loading.loader import to_device
    from mpt.data.pictures.images import write_grid
    from mpt.engine.state.evaluation import preview
    from mpt.inference.trained import open_trained

    trained = open_trained(str(folder), folder.parent, "cpu")
    batch = trained.test_data.fetch(list(range(SHOWN_PAIRS)), 0)
    tiles = preview(trained.run, to_device(batch, torch.device("cpu"), trained.run.data))
    assert tiles is not None
    write_grid(tiles, PICTURE, 3)


if __name__ == "__main__":
    main()
