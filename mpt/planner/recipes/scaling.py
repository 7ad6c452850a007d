"""From one card to thousands: memory per rank, step time and efficiency by the number of ranks, and their limits.

Every row is a plan of its own, by trace; those that differ in a growing batch alone share two
(`mpt.planner.plans.worlds`). `weak` keeps the samples per card, so the batch grows with the cards; `strong` keeps the
batch of all. Efficiency is computing's share of the cards' capability: samples per second and card against those of
one card, or of the fewest cards that were planned.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mpt.config.load import load_config
from mpt.config.schema import Config
from mpt.errors import ConfigError
from mpt.planner.answers.plan import Plan
from mpt.planner.client.session import Answer, Answered, Session
from mpt.planner.facts.placement import STRATEGIES, Placement
from mpt.planner.trace.timeline import save_figure

LARGEST = 4096
KINDS = ("weak", "strong")
GIB = 2**30
FAR_ABOVE = 3
"""A card with that many times the memory of the largest row is left out of the picture."""
FAR_APART = 20
"""Rows whose memory differs by so much are drawn on a logarithmic axis."""
COLOURS = {"ddp": "#4c72b0", "fsdp": "#dd8452"}


@dataclass(frozen=True)
class Row(Answered):
    """A number of cards with a strategy."""

    nproc: int
    words: str
    batch_size: int
    answer: Answer[Plan]

    @property
    def samples_per_second(self) -> float:
        """Of all cards together."""
        return self.batch_size / self.plan.step_seconds

    @property
    def bottleneck(self) -> str:
        """Its limit: memory if it does not fit, else the larger of computing and exposed communication."""
        if self.plan.fits is False:
            held = self.plan.by_category
            return f"memory: {max(held, key=held.__getitem__)}"
        ranks = self.plan.ranks
        if ranks is None or ranks.seconds.exposed < 0.1 * ranks.seconds.total:
            return "computing"
        return ranks.slowest_link

    @property
    def exposed_seconds(self) -> float:
        """Communication that does not overlap with computation; 0 for a single process."""
        return 0.0 if self.plan.ranks is None else self.plan.ranks.seconds.exposed


@dataclass(frozen=True)
class Scaling:
    """All rows, by strategy and then by the number of cards."""

    kind: str
    rows: list[Row]

    @property
    def planned(self) -> list[Row]:
        """The rows that could be planned."""
        return [row for row in self.rows if not row.error]

    def refused(self) -> list[str]:
        """Return why rows could not be planned, each reason once with its numbers of cards."""
        found: dict[tuple[str, str], list[int]] = {}
        for row in self.rows:
            if row.error:
                found.setdefault((row.words, row.error), []).append(row.nproc)
        return [
            f"{words} on {', '.join(map(str, cards))} cards: {error}"
            for (words, error), cards in found.items()
        ]

    def efficiency(self, row: Row) -> float:
        """Return samples per second and card against those of the fewest cards planned."""
        first = min(self.planned, key=lambda one: one.nproc)
        return row.samples_per_second / row.nproc / (first.samples_per_second / first.nproc)

    @property
    def fewest(self) -> Row | None:
        """The fewest cards that it fits on; among strategies the fastest."""
        fitting = [row for row in self.planned if row.plan.fits]
        return min(fitting, key=lambda row: (row.nproc, row.plan.step_seconds), default=None)


def sizes_until(largest: int) -> list[int]:
    """Return 1, 2, 4, 8 and so on, with the largest itself."""
    sizes = [1]
    while sizes[-1] * 2 <= largest:
        sizes.append(sizes[-1] * 2)
    return sizes if sizes[-1] == largest else [*sizes, largest]


@dataclass(frozen=True)
class Asked:
    """Plans that are asked of a session at once: numbers of cards under one strategy, each with its batch."""

    strategy: str
    sizes: list[int]
    batches: list[int]
    future: Future[Answer[Plan]] | Future[Answer[list[Plan]]]

    def rows(self) -> list[Row]:
        """Wait for the plans; return a row for each."""
        answers = separate(self.future.result(), len(self.sizes))
        each = zip(self.sizes, self.batches, answers, strict=True)
        return [Row(nproc, self.strategy, batch, answer) for nproc, batch, answer in each]


def plan_scaling(
    session: Session,
    config: Config,
    kind: str,
    base: Placement,
    strategy: str | None,
    budget: int | None,
) -> Scaling:
    """Plan all numbers of cards. Raises ConfigError for a kind that is not known, or if nothing can be planned."""
    if kind not in KINDS:
        raise ConfigError(f"--scaling: found {kind!r}; allowed: {', '.join(KINDS)}")
    asked: list[Asked] = []
    for name in (strategy,) if strategy else STRATEGIES:
        is_alone_too = name == "ddp" or strategy is not None
        counts = [nproc for nproc in sizes_until(base.nproc) if nproc > 1 or is_alone_too]
        for sizes in traced_together(counts, kind, name):
            batches = [
                config.train.batch_size * (nproc if kind == "weak" else 1) for nproc in sizes
            ]
            if batches[0] < sizes[0]:
                continue
            own = with_batch_size(config, batches[0], session.allow)
            wish = {
                "budget_bytes": budget,
                "placement": replace(base, nproc=sizes[0], strategy=name).as_data(),
            }
            is_one_trace = traces_once(kind, name) and sizes[0] > 1
            future = (
                session.submit_worlds(own, sizes, **wish)
                if is_one_trace
                else session.submit(own, **wish)
            )
            asked.append(Asked(name, sizes, batches, future))
    rows = [row for one in asked for row in one.rows()]
    if all(row.error for row in rows):
        raise ConfigError(rows[0].error)
    return Scaling(kind, rows)


def traces_once(kind: str, strategy: str) -> bool:
    """Return whether a rank does the same in worlds of all sizes: under DDP, if the batch grows with them."""
    return kind == "weak" and strategy == "ddp"


def traced_together(counts: Sequence[int], kind: str, strategy: str) -> list[list[int]]:
    """Return numbers of cards in groups that one trace serves."""
    if not traces_once(kind, strategy):
        return [[nproc] for nproc in counts]
    shared = [nproc for nproc in counts if nproc > 1]
    return [*([nproc] for nproc in counts if nproc == 1), *([shared] if shared else [])]


def separate(answer: Answer[Plan] | Answer[list[Plan]], count: int) -> list[Answer[Plan]]:
    """Return an answer for each of some worlds, of one that holds all their plans, or the error of all."""
    if answer.found is None:
        return [Answer(error=answer.error, exit_code=answer.exit_code)] * count
    plans = answer.found if isinstance(answer.found, list) else [answer.found]
    return [Answer(plan) for plan in plans]


def with_batch_size(config: Config, batch_size: int, allow: Sequence[str]) -> Config:
    """Return a configuration with another batch."""
    data = config.to_data()
    return load_config({**data, "train": {**data["train"], "batch_size": batch_size}}, allow=allow)


def as_data(scaling: Scaling) -> dict[str, Any]:
    """Return it as JSON can hold it."""
    return {
        "scaling": scaling.kind,
        "rows": [row_as_data(scaling, row) for row in scaling.rows],
        "fewest": None
        if scaling.fewest is None
        else {"nproc": scaling.fewest.nproc, "strategy": scaling.fewest.words},
    }


def row_as_data(scaling: Scaling, row: Row) -> dict[str, Any]:
    """Return a row as JSON can hold it."""
    common = {"nproc": row.nproc, "strategy": row.words, "batch_size": row.batch_size}
    if row.error:
        return {**common, "error": row.error}
    return {
        **common,
        "total_bytes": row.plan.total,
        "fits": row.plan.fits,
        "by_category": row.plan.by_category,
        "step_seconds": row.plan.step_seconds,
        "samples_per_second": row.samples_per_second,
        "efficiency": scaling.efficiency(row),
        "bottleneck": row.bottleneck,
        "seconds": {} if row.plan.ranks is None else vars(row.plan.ranks.seconds),
    }


def write_picture(path: Path, scaling: Scaling, title: str, budget: int | None) -> None:
    """Write a PNG: memory per card, step time with its exposed part, and efficiency, over the number of cards.

    Raises InputOutputError when the file cannot be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(3, 1, figsize=(8, 9), sharex=True, layout="constrained")
    memory, time, efficiency = panels
    for words in dict.fromkeys(row.words for row in scaling.planned):
        draw_strategy(panels, scaling, words)
    if budget is not None:
        draw_budget(memory, scaling, budget)
    figure.suptitle(title, fontsize=11)
    texts = ("GiB per card", "step, ms (logarithmic)", "efficiency, %")
    for axes, text in zip(panels, texts, strict=True):
        axes.set_ylabel(text)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    choose_memory_scale(memory, [row.plan.total for row in scaling.planned])
    efficiency.set_ylim(0, 105)
    time.set_yscale("log")
    time.yaxis.set_major_formatter("{x:g}")
    efficiency.set_xscale("log", base=2)
    ticks = sorted({row.nproc for row in scaling.planned})
    efficiency.set_xticks(ticks, [str(tick) for tick in ticks], fontsize=8)
    efficiency.set_xlabel(
        "cards" if scaling.kind == "strong" else "cards; the batch grows with them"
    )
    save_figure(figure, path)


def draw_strategy(panels: Sequence[Any], scaling: Scaling, words: str) -> None:
    """Draw a strategy's curves into the panels for memory, time and efficiency."""
    memory, time, efficiency = panels
    rows = [row for row in scaling.planned if row.words == words]
    cards = [row.nproc for row in rows]
    colour = COLOURS.get(words, "#55a868")
    style: dict[str, Any] = {"color": colour, "marker": "o", "markersize": 4, "label": words}
    memory.plot(cards, [row.plan.total / GIB for row in rows], **style)
    time.plot(cards, [row.plan.step_seconds * 1e3 for row in rows], **style)
    exposed = [row.exposed_seconds * 1e3 or math.nan for row in rows]
    time.plot(cards, exposed, color=colour, linestyle=":", label=f"{words}: exposed communication")
    efficiency.plot(cards, [100 * scaling.efficiency(row) for row in rows], **style)


def draw_budget(axes: Any, scaling: Scaling, budget: int) -> None:
    """Draw the budget as a line, or name it if the line would press all curves to the axis."""
    usable = f"{budget / GIB:.3g} GiB are usable"
    if budget <= FAR_ABOVE * max(row.plan.total for row in scaling.planned):
        axes.axhline(budget / GIB, color="black", linestyle="--", linewidth=1, label=usable)
    else:
        axes.plot([], [], " ", label=f"{usable}, above this picture")


def choose_memory_scale(axes: Any, totals: Sequence[int]) -> None:
    """Let the axis begin at 0, or make it logarithmic for a whole batch of thousands of cards."""
    if max(totals) > FAR_APART * min(totals):
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter("{x:g}")
        axes.set_ylabel("GiB per card (logarithmic)")
    else:
        axes.set_ylim(0, 1.15 * max(totals) / GIB)
