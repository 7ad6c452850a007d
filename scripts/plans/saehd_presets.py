"""One story for SAEHD at 512 pixels: its presets by card, the plan for 6 GB, and the tables of three pages.

    python scripts/plans/saehd_presets.py            # plan again, and write what is said of it everywhere
    python scripts/plans/saehd_presets.py --check    # plan again, and fail if a file says something else

A preset raises what a user of DeepFaceLab raises on a larger card: the batch, then the networks' dimensions, then
float32; of its batches the largest that is sure to fit is taken. On 6 GB the batch and the networks stay, and the
first of `SMALLEST` that is sure to fit is taken. The article's step is planned alongside (`saehd_article_step.py`).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

import mpt
from mpt.config.finding.shipped import find_shipped
from mpt.config.load import load_config
from mpt.config.sizes import describe_bytes
from mpt.config.text.yaml_text import write_text
from mpt.planner.answers.plan import Plan
from mpt.planner.client.session import Session
from mpt.planner.facts.calibration import Calibration
from mpt.planner.facts.gpus import find_gpu
from mpt.planner.facts.verdict import fits_surely
from mpt.planner.recipes.patch_origin import describe_origin
from mpt.report.units import show_seconds

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from scripts.command_line import described  # noqa: E402
from scripts.plans.saehd_article_step import article  # noqa: E402
from scripts.plans.saehd_memory import CONFIG, RECIPES, cells_of, heading_of  # noqa: E402

DOCS = ROOT / "docs"
FILE = find_shipped(CONFIG)
PRESETS, PLAN = FILE.parent / "presets", FILE.with_name("saehd_512.plan.yaml")
COMMAND = "python scripts/plans/saehd_presets.py"
BATCHES = (8, 10, 12, 16, 20, 24)
WIDE = {"ae_dims": 352, "e_dims": 72, "d_dims": 84, "d_mask_dims": 26}
WIDER = {"ae_dims": 384, "e_dims": 80, "d_dims": 96, "d_mask_dims": 32}
WIDEST = {"ae_dims": 512, "e_dims": 96, "d_dims": 128, "d_mask_dims": 48}
SMALLEST: tuple[tuple[str, dict[str, Any]], ...] = (
    ("activations offloaded", {"memory": {"offload_activations": True}}),
    ("micro-batches of 4", {"memory": {"micro_batch": 4}}),
    ("micro-batches of 2", {"memory": {"micro_batch": 2}}),
    ("micro-batches of 1", {"memory": {"micro_batch": 1}}),
    (
        "micro-batches of 1, activations offloaded",
        {"memory": {"micro_batch": 1, "offload_activations": True}},
    ),
)
"""Ways to train the configuration as it is on 6 GB, the fastest first."""
ARTICLE_SECONDS, ARTICLE_BUSY = (2.6, 3.1), (0.7, 0.9)
"""What the article measured on an RTX 2060, and which share of the time the card was busy by it."""


@dataclass(frozen=True)
class Card:
    """A size of card, the card that is planned for it, and what its preset raises."""

    size_gb: int
    gpu: str
    words: str
    raised: dict[str, Any]


CARDS = (
    Card(8, "rtx3070", "", {}),
    Card(10, "rtx3080", "larger networks", {"model": WIDE}),
    Card(12, "rtx3060", "larger networks", {"model": WIDER}),
    Card(
        16, "rtx4080", "larger networks, float32", {"model": WIDER, "precision": {"mode": "fp32"}}
    ),
    Card(
        24,
        "rtx4090",
        "the largest networks, float32",
        {"model": WIDEST, "precision": {"mode": "fp32"}},
    ),
)


@dataclass(frozen=True)
class Chosen:
    """A preset: its words, patch and plan."""

    card: Card
    words: str
    patch: dict[str, Any]
    plan: Plan
    budget: int

    @property
    def path(self) -> Path:
        """The preset's file."""
        return PRESETS / f"saehd_512_{self.card.size_gb}gb.yaml"

    @property
    def text(self) -> str:
        """The preset's file as it is to be."""
        return self.write(
            f"mpt train @saehd_512 --with @{self.path.stem} dataset.src=DIR dataset.dst=DIR"
        )

    def write(self, command: str) -> str:
        """Return the patch with its command and what was planned."""
        config = patched(self.patch)
        said = (
            f"{self.words}: {describe_bytes(self.plan.total)} of the {describe_bytes(self.budget)} that a card of "
            f"{self.card.size_gb} GB gives to programs, {show_seconds(self.plan.step_seconds)} a step on an "
            f"{self.card.gpu}; written by {COMMAND}"
        )
        origin = describe_origin(config, self.card.gpu, self.budget)
        return f"# {command}\n# {said}\n{origin}\n{write_text(self.patch)}"


def patched(patch: dict[str, Any]) -> Any:
    """Return the configuration with a patch."""
    data = yaml.safe_load(FILE.read_text("utf-8"))
    for section, values in patch.items():
        data[section] = {**data.get(section, {}), **values}
    return load_config(data)


def main() -> None:
    """Write or check all that is said."""
    parser = described(__doc__)
    parser.add_argument(
        "--check",
        action="store_true",
        help="change nothing; fail if a file is not as planned today",
    )
    parser.add_argument(
        "--presets-alone", action="store_true", help="with --check: leave the table of recipes out"
    )
    arguments = parser.parse_args()
    chosen = list(choose_all())
    files = dict(texts_of(chosen, None if arguments.presets_alone else plan_recipes()))
    wrong = [
        path
        for path, text in files.items()
        if not path.is_file() or path.read_text("utf-8") != text
    ]
    for path in wrong:
        print(f"{'differs' if arguments.check else 'wrote'}: {path.relative_to(ROOT)}")
        if not arguments.check:
            path.write_text(files[path], "utf-8")
    if arguments.check and wrong:
        sys.exit(f"what is said of SAEHD at 512 pixels is not what is planned now: {COMMAND}")


def choose_all() -> Iterator[Chosen]:
    """Yield the preset of every card. Raises SystemExit where none is sure to fit."""
    smallest = Card(6, "rtx2060", "", {})
    yield choose(smallest, SMALLEST)
    for card in CARDS:
        largest = [
            (words_of(card, size), {**card.raised, "train": {"batch_size": size}})
            for size in reversed(BATCHES)
        ]
        yield choose(card, largest)


def words_of(card: Card, batch_size: int) -> str:
    """Return what a preset raises."""
    return f"batch {batch_size}{f', {card.words}' if card.words else ''}"


def choose(card: Card, candidates: Sequence[tuple[str, dict[str, Any]]]) -> Chosen:
    """Return the first of the candidates that is sure to fit a card."""
    gpu = find_gpu(card.gpu)
    budget = replace(gpu, name="", memory_gib=card.size_gb, is_installed=False).usable_bytes
    with Session(gpu, Calibration()) as session:
        answers = session.plan([patched(patch) for _, patch in candidates], budget_bytes=budget)
        for (words, patch), answer in zip(candidates, answers, strict=True):
            plan = answer.get()
            if plan.fits and not plan.tight and fits_surely(plan):
                return Chosen(card, words, patch, plan, budget)
    sys.exit(f"{card.gpu}: none of {', '.join(words for words, _ in candidates)} is sure to fit")


def plan_recipes() -> list[str]:
    """Return the table of recipes for 6 GiB, as `saehd_memory.py` prints it."""
    gpu = find_gpu("rtx2060")
    with Session(gpu, Calibration()) as session:
        answers = session.plan(
            [load_config(CONFIG, words) for _, words in RECIPES], budget_bytes=gpu.usable_bytes
        )
        rows = [
            " | ".join((name, *cells_of(answer.get())))
            for (name, _), answer in zip(RECIPES, answers, strict=True)
        ]
    return [*heading_of(6.0), *(f"| {row} |" for row in rows)]


def texts_of(chosen: Sequence[Chosen], recipes: list[str] | None) -> Iterator[tuple[Path, str]]:
    """Yield every file that says something of the presets, with its text."""
    for one in chosen:
        yield one.path, one.text
    first = chosen[0]
    yield (
        PLAN,
        first.write("mpt train @saehd_512 --with @saehd_512.plan dataset.src=DIR dataset.dst=DIR"),
    )
    table = [
        "| Card, GB | planned for | preset | raises | memory | a step |",
        "|---:|---|---|---|---:|---:|",
    ]
    for one in chosen:
        cells = [one.card.size_gb, one.card.gpu, f"`@{one.path.stem}`", one.words]
        cells += [describe_bytes(one.plan.total), show_seconds(one.plan.step_seconds)]
        table.append(f"| {' | '.join(map(str, cells))} |")
    page = DOCS / "benchmarks" / "saehd.md"
    text = between(page.read_text("utf-8"), "presets", table)
    text = between(text, "article", article_lines())
    yield page, text if recipes is None else between(text, "recipes", recipes)
    page = DOCS / "how-to" / "saehd.md"
    yield page, between(page.read_text("utf-8"), "presets", table)
    page = DOCS / "benchmarks" / "presets.md"
    rows = [row_of(one) for one in chosen]
    kept = page.read_text("utf-8").splitlines()
    place = next(number for number, line in enumerate(kept) if line.startswith("| `saehd_512` |"))
    kept = [line for line in kept if not line.startswith("| `saehd_512` |")]
    yield page, "\n".join([*kept[:place], *rows, *kept[place:]]) + "\n"


def row_of(one: Chosen) -> str:
    """Return a preset's row on the page of all presets."""
    batch = one.patch.get("train", {}).get("batch_size", 8)
    cost = "not bit-equal" if one.card.size_gb == 6 else "other settings"
    memory, seconds = describe_bytes(one.plan.total), show_seconds(one.plan.step_seconds)
    return (
        f"| `saehd_512` | {one.card.size_gb} | {batch} | {one.words} | {cost} | {memory} | "
        f"{seconds}, {one.card.gpu} |"
    )


def article_lines() -> list[str]:
    """Return the article's step as planned, next to what it measured."""
    gpu = "rtx2060"
    whole, cut = (
        mpt.plan_step(article, gpu=gpu, windows=windows).plan for windows in ("whole", "separable")
    )
    plain = mpt.plan_step(article, gpu=gpu, half=False, recomputes=False).plan
    low, high = ARTICLE_SECONDS
    busy = f"{low * ARTICLE_BUSY[0]:.1f} to {high * ARTICLE_BUSY[1]:.1f} s"
    return [
        "| the article's step, batch 8, on an RTX 2060 | s |",
        "|---|---:|",
        f"| measured by the article, half precision and checkpointing | {low} to {high} |",
        f"| of that the card was busy (70 to 90 %) | {busy} |",
        f"| planned, structural loss by whole windows | {whole.step_seconds:.1f} |",
        f"| planned, its windows cut into rows and columns | {cut.step_seconds:.1f} |",
        f"| planned, float32, nothing recomputed | {plain.step_seconds:.1f} |",
    ]


def between(text: str, name: str, lines: Sequence[str]) -> str:
    """Return a page with the lines between the marks of a name. Raises SystemExit for a page without them."""
    start, end = f"<!-- {name} -->\n", f"\n<!-- end of {name} -->"
    if start not in text or end not in text:
        sys.exit(f"a page lacks the mark {start.strip()}")
    pattern = re.compile(f"{re.escape(start)}.*?{re.escape(end)}", re.S)
    return pattern.sub(lambda _: start + "\n".join(lines) + end, text)


if __name__ == "__main__":
    main()
