"""The cheapest set of given cards that trains a configuration: how many of which, shared out in which way.

Sets are tried in the order of their prices, each with every way of sharing the work; if none of them fits as it
stands, recipes are searched for the one that comes nearest. The first price at which something fits ends it. The batch
is that of the configuration, shared out over the set's cards. Sets of one price are distinguished by the
step's time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import Any

from mpt.config.load import load_config
from mpt.config.schema import Config
from mpt.errors import ConfigError, MemoryBudgetError
from mpt.planner.answers.plan import Plan
from mpt.planner.client.session import Answer, Answered, PlanError, Session
from mpt.planner.facts.calibration import load_calibration
from mpt.planner.facts.gpus import Gpu, find_gpu
from mpt.planner.facts.placement import Placement
from mpt.planner.facts.verdict import fits_surely
from mpt.planner.recipes.recipe import Patch, changes_what_is_learnt, describe_patch
from mpt.planner.recipes.search import search

OFFER = re.compile(r"(?P<name>[^:@]+)(?::(?P<count>\d+))?(?:@(?P<price>\d+(?:\.\d+)?))?")
FORM = "write NAME:COUNT@PRICE, such as rtx3090:4@0.3; COUNT and PRICE may be left out"
Way = Mapping[str, str | int]
"""Settings of `parallel` that share the work out."""
WAYS: tuple[Way, ...] = (
    {"strategy": "ddp"},
    {"strategy": "fsdp", "shard": "grad"},
    {"strategy": "fsdp", "shard": "full"},
)


@dataclass(frozen=True)
class Offer:
    """Cards of one kind: how many there are, and the price of one, in any unit that all offers share."""

    gpu: Gpu
    count: int = 1
    price: float | None = None


@dataclass(frozen=True)
class Candidate(Answered):
    """Some cards of a kind with a way of sharing the work."""

    gpu: Gpu
    nproc: int
    price: float
    way: Way
    patch: Patch
    answer: Answer[Plan]

    @property
    def fits(self) -> bool:
        """Whether it fits with the planner's usual error to spare."""
        return not self.error and fits_surely(self.plan)

    @property
    def words(self) -> str:
        """The way of sharing and the recipe, in words."""
        shared = " ".join(map(str, self.way.values())) if self.nproc > 1 else "one process"
        marked = " (lossy)" if changes_what_is_learnt(self.patch) else ""
        return f"{shared}, {describe_patch(self.patch)}{marked}" if self.patch else shared

    @property
    def settings(self) -> Patch:
        """The change of the configuration."""
        return {**self.patch, **({"parallel": dict(self.way)} if self.nproc > 1 else {})}


@dataclass(frozen=True)
class Cheapest:
    """Everything that was planned, in the order of trying, and the answer: None if nothing fits."""

    candidates: list[Candidate]

    @property
    def best(self) -> Candidate | None:
        """The fastest one that fits at the lowest price."""
        fitting = [one for one in self.candidates if one.fits]
        return min(fitting, key=lambda one: (one.price, one.plan.step_seconds), default=None)


def parse_offers(texts: Iterable[str]) -> list[Offer]:
    """Parse `--cards`. Raises ConfigError for malformed words, or prices for some cards only."""
    offers = []
    for text in texts:
        if "+" in text:
            raise ConfigError(
                f"--cards: found {text!r}; a set of cards of two kinds is not planned. All ranks get as much to do, so "
                "it trains what as many of its weaker cards train: write those"
            )
        found = OFFER.fullmatch(text.strip())
        if found is None or found["count"] == "0":
            raise ConfigError(f"--cards: found {text!r}; {FORM}")
        price = None if found["price"] is None else float(found["price"])
        card = find_gpu(found["name"], "--cards")
        offers.append(Offer(card, int(found["count"] or 1), price))
    names = [one.gpu.name for one in offers]
    if len(set(names)) < len(names):
        raise ConfigError(f"--cards: {max(names, key=names.count)} is named twice")
    priced = [one.price is not None for one in offers]
    if any(priced) != all(priced) or (len(offers) > 1 and not all(priced)):
        raise ConfigError(
            f"--cards: several kinds are compared by their prices, so each needs one; {FORM}"
        )
    return offers


def sets_of(offers: Sequence[Offer], batch_size: int) -> list[tuple[float, Offer, int]]:
    """Return (price, offer, number of cards), cheapest first: 1, 2, 4 and so on, and all there are."""
    sets = []
    for offer in offers:
        numbers = {1 << power for power in range(offer.count.bit_length())} | {offer.count}
        each = 1.0 if offer.price is None else offer.price
        sets += [
            (each * number, offer, number) for number in sorted(numbers) if number <= batch_size
        ]
    return sorted(sets, key=lambda one: (one[0], one[2]))


def find_cheapest(
    config: Config,
    offers: Sequence[Offer],
    *,
    network: str | None,
    per_machine: int,
    allow_lossy: bool,
    workers: int,
    on_answer: Callable[[int, int], None],
) -> Cheapest:
    """Plan sets of cards until one fits. Raises ConfigError if none can be planned at all."""
    found: list[Candidate] = []
    for _, group in groupby(sets_of(offers, config.train.batch_size), key=lambda one: one[0]):
        for price, offer, number in group:
            base = Placement(number, network=network, per_machine=per_machine)
            with Session(
                offer.gpu, load_calibration(offer.gpu.name), config.granted, workers
            ) as session:
                tried = list(as_it_stands(session, config, offer.gpu, base, price))
                if not any(one.fits for one in tried):
                    tried += with_recipe(session, config, tried, base, allow_lossy, on_answer)
            found += tried
        if any(one.fits for one in found):
            break
    if all(one.error for one in found):
        raise ConfigError(found[0].error)
    return Cheapest(found)


def as_it_stands(
    session: Session, config: Config, gpu: Gpu, base: Placement, price: float
) -> Iterator[Candidate]:
    """Yield the configuration's plan with every way of sharing it out."""
    asked = []
    for way in ways_for(base):
        own = shared(config, way, session.allow)
        wish = asdict(replace(base, strategy=str(way["strategy"])))
        asked.append((way, session.submit(own, budget_bytes=gpu.usable_bytes, placement=wish)))
    for way, future in asked:
        yield Candidate(gpu, base.nproc, price, way, {}, future.result())


def with_recipe(
    session: Session,
    config: Config,
    tried: Sequence[Candidate],
    base: Placement,
    allow_lossy: bool,
    on_answer: Callable[[int, int], None],
) -> list[Candidate]:
    """Return the first recipe that fits for the way that needs least unchanged; [] if there is none."""
    planned = [one for one in tried if not one.error]
    if not planned:
        return []
    nearest = min(planned, key=lambda one: one.plan.total)
    session.placement = asdict(replace(base, strategy=str(nearest.way["strategy"])))
    budget = nearest.gpu.usable_bytes
    if nearest.plan.context_bytes + nearest.plan.by_category.get("parameters", 0) // 2 > budget:
        return []
    try:
        recipes = search(
            session,
            shared(config, nearest.way, session.allow),
            nearest.gpu,
            budget,
            allow_lossy=allow_lossy,
            on_answer=on_answer,
        ).recipes
    except (MemoryBudgetError, PlanError):
        return []
    fitting = [one for one in recipes if one.patch and one.fits_well]
    return [replace(nearest, patch=one.patch, answer=Answer(one.plan)) for one in fitting[:1]]


def ways_for(base: Placement) -> list[Way]:
    """Return the ways of sharing the work over that many cards.

    Hybrid is over the cards of a machine, or half of those of the only one; over fewer than two it is `ddp`.
    """
    if base.nproc == 1:
        return [WAYS[0]]
    together = base.per_machine if base.nproc > base.per_machine else base.nproc // 2
    if together < 2 or base.nproc % together:
        return list(WAYS)
    return [*WAYS, {"strategy": "fsdp", "shard": "hybrid", "shard_ranks": together}]


def shared(config: Config, way: Way, allow: Sequence[str]) -> Config:
    """Return a configuration that is shared out in a way."""
    data = config.to_data()
    parallel = {**data.get("parallel", {}), "shard": "full", "shard_ranks": None, **way}
    return load_config({**data, "parallel": parallel}, allow=allow)


def as_data(found: Cheapest, **of_best: str) -> dict[str, Any]:
    """Return it as JSON can hold it; `of_best` are further entries of the answer."""
    best = found.best
    return {
        "candidates": [one_as_data(one) for one in found.candidates],
        "best": None if best is None else {**one_as_data(best), **of_best},
    }


def one_as_data(one: Candidate) -> dict[str, Any]:
    """Return a candidate as JSON can hold it."""
    common = {
        "gpu": one.gpu.name,
        "nproc": one.nproc,
        "price": one.price,
        **one.way,
        "recipe": describe_patch(one.patch),
    }
    if one.error:
        return {**common, "error": one.error}
    return {
        **common,
        "settings": one.settings,
        "fits": one.fits,
        "total_bytes": one.plan.total,
        "budget_bytes": one.plan.budget_bytes,
        "step_seconds": one.plan.step_seconds,
    }
