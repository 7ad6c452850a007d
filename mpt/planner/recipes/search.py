"""Which recipe fits a budget and is fastest: precision, memory tricks and micro-batches, tried and not guessed.

Every recipe is the user's configuration with a small patch, built and traced like any other. The search goes from
cheap changes to costly ones: first each precision, and the fastest of them first each with each single trick; then
numbers to be found, such as the share of activations that may stay (a trick's `DIALS`), by bisection; then pairs of a
trick for activations and one for the optimizer; then micro-batches. A precision that alone takes longer than what fits
in another one, by more than the time model's band, gets no tricks, the file's own only the first round. Left out are:

- Needless ones: a trick costs time, so a recipe is not tried if a part of it fits already, or if a recipe
  of the same precision fits that changes nothing and takes no longer. Nor is one that cannot come first: something
  fits that changes no more, and takes no longer than a traced part of it; or that changes nothing, and takes no longer
  than a part that changes something by as much as the ranking prefers it.
- Hopeless ones: nothing that is done to activations or to the batch makes weights, gradients and optimizer state
  smaller. If a traced recipe holds too much in those alone, the ones that leave them as they are are not traced. A
  recipe whose networks alone, as they are built, exceed the budget is not traced further than that. And if two
  micro-batches of a recipe show that even one of nothing would be too much, smaller ones are not.

Recipes that a configuration refuses (a trick that clashes with another, an optimizer that a mode cannot run) are left
out too, with their reasons. Growing segments need no trace of their own: each plan has their effect.

The ranking is by predicted time; a recipe's cost in exactness decides between recipes of about the same time, and
is reported: the tricks' own `exact`, the change of precision, and the warnings of the build.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

from mpt.config.checking.relief import reliefs, splitter
from mpt.config.schema import Config
from mpt.errors import ConfigError, MemoryBudgetError
from mpt.planner.answers.plan import Plan
from mpt.planner.client.session import Answer, Session
from mpt.planner.facts.gpus import Gpu
from mpt.planner.recipes.dials import Turn
from mpt.planner.recipes.lighter_modes import is_scaled, lighter_modes
from mpt.planner.recipes.patches import (
    Combinations,
    combinations,
    has_same_tricks,
    is_same_but_for_size,
    joined,
    mode_patch,
    parted,
    patched,
    precision_patches,
)
from mpt.planner.recipes.recipe import TIE, Patch, Recipe, is_part, rank

PARTS = (2, 4, 8)
LAST_RESORT_PARTS = (16, 32)
HEAVY = 0.3
"""Share of the memory, or of the budget if that is less, without the context, below which moving weights is not
tried.
"""


@dataclass(frozen=True)
class Search:
    """The result of a search. `recipes` is sorted: those that fit first, the fastest of them first."""

    recipes: list[Recipe]
    refused: list[tuple[Patch, str]]
    """Patches that the configuration, or the planner, refuses, each with the reason."""
    hopeless: list[Patch]
    """Patches proven too large by the memory of other recipes."""


def search(
    session: Session,
    config: Config,
    gpu: Gpu,
    budget_bytes: int,
    *,
    largest_batch: bool = False,
    allow_lossy: bool = False,
    goes_on: Callable[[Plan], bool] = lambda plan: True,
    on_answer: Callable[[int, int], None] = lambda planned, fitting: None,
) -> Search:
    """Return the recipes for a budget.

    `goes_on` gets the plan of the configuration unchanged and says whether to search; it may raise. `on_answer`
    hears after each plan how many there are and how many fit. What changes the learnt result (weights without masters,
    states in 8 bits) is proposed only with `allow_lossy`.

    Raises PlanError when the configuration itself cannot be planned. `largest_batch` is looked for at the
    end, in the recipe that comes first.
    """
    found = _Search(session, config, budget_bytes, on_answer, allow_lossy)
    tried = combinations(allow_lossy)
    precisions = list(precision_patches(config, gpu, allow_lossy))
    if any(precisions):
        session.fork_ahead()
    first = session.submit(config, budget_bytes=budget_bytes, timeline=True, whole_run=True)
    alone = [found.submit(precision) for precision in precisions if precision]
    searches = goes_on(first.result().get())
    found.keep(({}, config, first))
    if not searches:
        return Search(
            found.with_largest(found.recipes[:1]) if largest_batch else found.recipes[:1], [], []
        )
    for attempt in alone:
        found.keep(attempt)
    found.try_single(precisions, tried)
    heavy = [precision for precision in precisions if found.is_heavy(precision)]
    found.try_all(each_with(heavy, tried.weights))
    found.turn_dials(precisions)
    found.try_all(each_with(precisions, tried.pairs))
    found.try_all(each_with(heavy, tried.beside_weights))
    found.try_without_scale(gpu)
    if splitter() not in config.memory.tricks:
        found.try_split(precisions, heavy, tried)
    if found.recipes and not found.has_fitting:
        found.shrink_smallest()
    ranked = rank(found.recipes)
    if largest_batch and ranked and ranked[0].fits:
        ranked = found.with_largest(ranked)
    return Search(ranked, found.refused, found.hopeless)


def each_with(precisions: Iterable[Patch], combined: Iterable[Patch]) -> Iterator[Patch]:
    """Yield each precision with each combination of tricks."""
    combined = list(combined)
    for precision in precisions:
        for tricks in combined:
            yield joined(precision, tricks)


_Attempt = tuple[Patch, Config, "Future[Answer[Plan]]"]


class _Search:
    """A search under way."""

    def __init__(
        self,
        session: Session,
        config: Config,
        budget_bytes: int,
        on_answer: Callable[[int, int], None],
        allow_lossy: bool,
    ) -> None:
        self.session, self.config, self.budget_bytes, self.on_answer = (
            session,
            config,
            budget_bytes,
            on_answer,
        )
        self.dialled = [
            one for one in reliefs("activations", "weights") if allow_lossy or not one.is_lossy
        ]
        self.allow_lossy = allow_lossy
        self.recipes: list[Recipe] = []
        self.refused: list[tuple[Patch, str]] = []
        self.hopeless: list[Patch] = []
        self._seen = [config.to_data()]

    @property
    def has_fitting(self) -> bool:
        """Whether anything fits so far."""
        return any(one.fits for one in self.recipes)

    def submit(self, patch: Patch) -> _Attempt | None:
        """Have a patch planned; None if it is refused, or changes nothing."""
        try:
            changed = patched(self.config, patch, self.session.allow)
        except ConfigError as error:
            self.refused.append((patch, str(error)))
            return None
        if changed.to_data() in self._seen:
            return None
        self._seen.append(changed.to_data())
        planned = self.session.submit(
            changed, budget_bytes=self.budget_bytes, timeline=True, only_if_built_fits=True
        )
        return patch, changed, planned

    def keep(self, attempt: _Attempt | None) -> None:
        """Wait for an answer and note it, and also its outcome with growing segments."""
        if attempt is None:
            return
        patch, changed, future = attempt
        answer = future.result()
        if answer.found is None:
            if answer.exit_code == MemoryBudgetError.exit_code:  # its networks alone are too much
                self.hopeless.append(patch)
            else:
                self.refused.append((patch, answer.error))
            return
        plan = answer.found
        self.recipes.append(Recipe(patch, changed, plan))
        if plan.growing is not None and plan.growing.fits:
            patch = joined(
                patch, {one.name: one.proposals[0] for one in reliefs("fragmentation")[:1]}
            )
            grown = patched(self.config, patch, self.session.allow)
            self.recipes.append(
                Recipe(patch, grown, replace(plan, **vars(plan.growing)), traced=False)
            )
        self.on_answer(
            sum(one.traced for one in self.recipes), sum(one.fits for one in self.recipes)
        )

    def with_largest(self, ranked: list[Recipe]) -> list[Recipe]:
        """Return recipes, the first of them with its largest batch."""
        first = ranked[0]
        answer = self.session.submit(
            first.config, budget_bytes=self.budget_bytes, largest_batch=True
        ).result()
        if answer.found is None:
            return ranked
        found = answer.found
        plan = replace(
            first.plan,
            largest_batch=found.largest_batch,
            largest_surely=found.largest_surely,
            largest_is_bound=found.largest_is_bound,
        )
        return [replace(first, plan=plan), *ranked[1:]]

    def try_all(self, patches: Iterable[Patch]) -> None:
        """Try the recipes that are worth it, as many at a time as there are workers; the answers decide which are.

        One waits for the answer to a part of it, or to other settings of the same tricks, which often decides.
        """
        pending: deque[_Attempt] = deque()
        for patch in patches:
            while pending and (
                len(pending) == self.session.workers
                or any(is_part(one, patch) or has_same_tricks(one, patch) for one, *_ in pending)
            ):
                self.keep(pending.popleft())
            attempt = self.submit(patch) if self.is_worth_trying(patch) else None
            if attempt is not None:
                pending.append(attempt)
        for attempt in pending:
            self.keep(attempt)

    def try_single(self, precisions: Sequence[Patch], tried: Combinations) -> None:
        """Try each trick alone, first with the fastest precision; none with a precision that another has outdone."""
        for precision in sorted(precisions, key=self.seconds_alone):
            if precision and self.is_outdone(precision):
                continue
            patches = [joined(precision, tricks) for tricks in tried.single if tricks]
            for attempt in [self.submit(patch) for patch in patches if not self.is_hopeless(patch)]:
                self.keep(attempt)

    def try_split(
        self, precisions: Sequence[Patch], heavy: Sequence[Patch], tried: Combinations
    ) -> None:
        """Try smaller and smaller micro-batches; the smallest only if nothing fits."""
        for count in (*PARTS, *LAST_RESORT_PARTS):
            if count > self.config.train.batch_size or (
                count in LAST_RESORT_PARTS and self.has_fitting
            ):
                break
            micro_batch = parted(self.config, count)
            self.try_all(
                each_with(precisions, [{**tricks, **micro_batch} for tricks in tried.split])
            )
            self.try_all(
                each_with(heavy, [{**tricks, **micro_batch} for tricks in tried.split_weights])
            )

    def try_without_scale(self, gpu: Gpu) -> None:
        """Try in bfloat16, which needs no loss scale, tricks that the configured half precision refuses for having
        one.

        Alone it takes the configured one's time and memory, and is not tried beside what comes before that.
        """
        names = [one.usable(gpu.has_bfloat16, unscaled=True) for one in lighter_modes(lossy=False)]
        plain = next((one for one in self.recipes if not one.patch), None)
        for name in filter(None, names if is_scaled(self.config.precision.mode) else ()):
            mode = {"precision": mode_patch(self.config, name)}
            alone = () if plain is None else (replace(plain, patch=mode),)
            if any(self.cannot_win(one, mode) for one in alone):
                continue
            refused = [patch["memory"] for patch, _ in self.refused if set(patch) == {"memory"}]
            patches = [joined(mode, tricks) for tricks in refused]
            self.try_all(one for one in patches if not self.is_hopeless(one, alone))

    def is_heavy(self, precision: Patch) -> bool:
        """Return whether weights, gradients and optimizer state are a large share of the excess, or of the budget."""
        plain = next((one for one in self.recipes if str(one.patch) == str(precision)), None)
        if plain is None or plain.fits_well:
            return False
        room = min(plain.plan.without_assumed, self.budget_bytes) - plain.plan.context_bytes
        return plain.plan.held_throughout >= HEAVY * room

    def turn_dials(self, precisions: Sequence[Patch]) -> None:
        """Find the gentlest number of each dial that fits well, with each precision that does not fit without.

        Their other end is known: a trick's strongest proposal relieves as much as any. If a trick has several dials,
        only the one that led to the fastest recipe is turned further. Exact tricks come first, and of these the ones
        with few dials: a number that takes no time, as copies during the computation do, makes the rest needless.
        """
        plans = {str(one.patch): one for one in self.recipes}
        groups = []
        for precision in precisions:
            plain = plans.get(str(precision)) if not self.is_outdone(precision) else None
            for trick in self.dialled if plain is not None and not plain.fits_well else ():
                if trick.dials and trick.proposals and trick.name not in self.config.memory.tricks:
                    strongest = plans.get(str(joined(precision, {trick.name: trick.proposals[-1]})))
                    assert plain is not None
                    groups.append(
                        [
                            Turn(precision, trick.name, dial, plain, strongest)
                            for dial in trick.dials
                        ]
                    )
        for turns in sorted(groups, key=lambda group: (not group[0].is_exact, len(group))):
            while turns:
                tries = [
                    (turn, value)
                    for turn in turns
                    if not self.cannot_win(turn.part, turn.patch(turn.most))
                    and (value := turn.next_value()) is not None
                ]
                self.turn(tries)
                turns = sorted((turn for turn, _ in tries), key=lambda one: one.fastest)
                turns = turns[:1]

    def turn(self, tries: Sequence[tuple[Turn, float]]) -> None:
        """Plan values of dials, all at once, and let the turns know."""
        for turn, value, attempt in [
            (turn, value, self.submit(turn.patch(value))) for turn, value in tries
        ]:
            turn.note(value, self.answer(attempt))

    def answer(self, attempt: _Attempt | None) -> Recipe | None:
        """Wait for an answer, note it, and return its recipe; None if there is none."""
        before = len(self.recipes)
        self.keep(attempt)
        return self.recipes[before] if len(self.recipes) > before else None

    def shrink_smallest(self) -> None:
        """If nothing fits, plan the smallest recipe with small micro-batches, to say how far it is off."""
        patch = min(self.recipes, key=lambda one: one.total).patch
        if splitter() in patch.get("memory", {}):
            self.keep(self.submit(joined(patch, parted(self.config, LAST_RESORT_PARTS[0]))))

    def is_worth_trying(self, patch: Patch) -> bool:
        """Return whether a patch is neither needless nor hopeless; note the hopeless."""
        if any(
            one.fits_well and one.is_part_of(patch) for one in self.recipes
        ) or self.is_pointless(patch.get("precision")):
            return False
        if any(self.cannot_win(part, patch) for part in self.parts_of(patch)):
            return False
        return not self.is_hopeless(patch)

    def is_hopeless(self, patch: Patch, others: Iterable[Recipe] = ()) -> bool:
        """Return whether other recipes, these among them, prove that a patch does not fit; note it."""
        if any(
            one.proves_hopeless(patch, self.budget_bytes) for one in (*self.recipes, *others)
        ) or self.cannot_shrink(patch):
            self.hopeless.append(patch)
            return True
        return False

    def is_pointless(self, precision: Any) -> bool:
        """Return whether more tricks with a precision are pointless for the time they take.

        They are if an exact recipe of it fits well and takes hardly longer than the precision alone, and if the
        precision is outdone by another.
        """
        own = [one for one in self.recipes if one.patch.get("precision") == precision]
        alone = min((one.plan.step_seconds for one in own if not one.tricks), default=0.0)
        quick = (one for one in own if one.is_exact and one.plan.step_seconds <= (1 + TIE) * alone)
        return any(one.fits_well for one in quick) or self.is_outdone(
            {"precision": precision} if precision else {}
        )

    def cannot_win(self, part: Recipe, patch: Patch) -> bool:
        """Return whether something that fits well comes before a patch, which takes no less time than a part of it.

        It does if it changes no more and takes no longer than the part, since what a patch has in addition to a part,
        or has more of, takes more time. Beside what changes nothing, a patch that changes something has to be faster
        by the band of the time model (`rank`), or by what is left of that beside a third one that it ties with.
        """
        limit = (
            *part.harshness[:-2],
            not part.is_exact or self.is_inexact(patch),
            len(patch.get("memory", {})),
        )
        least_band = min(one.plan.time_band for one in self.recipes)
        wide = 1 if self.allow_lossy or not any(limit[:-1]) else (1 + least_band) / (1 + TIE)
        fitting = (one for one in self.recipes if one.traced and one.fits_well)
        return any(
            one.harshness <= limit
            and one.plan.step_seconds
            <= (wide if one.changes_nothing else 1) * part.plan.step_seconds
            for one in fitting
        )

    def is_inexact(self, patch: Patch) -> bool:
        """Return whether a trick of a patch is known to change the order of sums."""
        inexact = {name for one in self.recipes for name in one.plan.inexact}
        return not inexact.isdisjoint(patch.get("memory", {}))

    def parts_of(self, patch: Patch) -> Iterator[Recipe]:
        """Yield the traced parts of a patch that take no longer than it.

        That is not known of one trick for activations and another: what is computed again need not be copied.
        """
        activations = {one.name for one in reliefs("activations")}
        for one in self.recipes:
            both = one.tricks.keys() | patch.get("memory", {}).keys()
            if (
                one.traced
                and one.is_part_of(patch)
                and (activations.isdisjoint(one.tricks) or len(activations & both) == 1)
            ):
                yield one

    def is_outdone(self, precision: Patch) -> bool:
        """Return whether a precision alone takes longer than a fitting recipe, by more than the time model's band.

        Or if something that changes nothing comes before it and all that takes longer.
        """
        alone = self.seconds_alone(precision)
        if precision and any(
            self.cannot_win(one, precision) for one in self.recipes if one.patch == precision
        ):
            return True
        fitting = (one.plan for one in self.recipes if one.fits_well)
        return alone < math.inf and any(
            plan.step_seconds * (1 + plan.time_band) < alone for plan in fitting
        )

    def seconds_alone(self, precision: Patch) -> float:
        """Return the time of a step in a precision with no trick; infinite if that is not planned."""
        found = (one for one in self.recipes if not one.tricks)
        seconds = (
            one.plan.step_seconds
            for one in found
            if one.patch.get("precision") == precision.get("precision")
        )
        return min(seconds, default=math.inf)

    def cannot_shrink(self, patch: Patch) -> bool:
        """Return whether larger micro-batches of this recipe prove that no smaller one fits.

        At every moment of a step bytes are a + b * size, so their peak is convex in the size: the line through two
        sizes, drawn on to a size of 0, lies below the peak of each smaller one.
        """
        size = splitter()
        if size not in patch.get("memory", {}):
            return False
        peaks = {
            one.tricks[size]: one.plan.allocated + one.plan.context_bytes
            for one in self.recipes
            if size in one.tricks and is_same_but_for_size(one.patch, patch)
        }
        if len(peaks) < 2:
            return False
        small, large = sorted(peaks)[:2]
        return bool(
            peaks[small] - (peaks[large] - peaks[small]) * small / (large - small)
            > self.budget_bytes
        )
