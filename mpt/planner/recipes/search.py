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

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

from mpt.config.schema import Config
from mpt.errors import ConfigError, MemoryBudgetError
from mpt.memory.relieving.relief import reliefs, splitter
from mpt.planner.answers.plan import Plan
from mpt.planner.client.session import Answer, Session
from mpt.planner.facts.gpus import Gpu
from mpt.planner.recipes.dials import Turn
from mpt.planner.recipes.known import Known
from mpt.planner.recipes.lighter_modes import is_scaled, lighter_modes
from mpt.planner.recipes.patches import (
    Combinations,
    combinations,
    has_same_tricks,
    joined,
    mode_patch,
    parted,
    patched,
    precision_patches,
)
from mpt.planner.recipes.recipe import Patch, Recipe, is_part, rank

PARTS = (2, 4, 8)
LAST_RESORT_PARTS = (16, 32)


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
    known, tried = found.known, combinations(allow_lossy)
    precisions = list(precision_patches(config, gpu, allow_lossy))
    if any(precisions):
        session.fork_ahead()
    first = session.submit(config, budget_bytes=budget_bytes, timeline=True, whole_run=True)
    alone = [found.submit(precision) for precision in precisions if precision]
    searches = goes_on(first.result().get())
    found.keep(({}, config, first))
    if not searches:
        return Search(
            found.with_largest(known.recipes[:1]) if largest_batch else known.recipes[:1], [], []
        )
    for attempt in alone:
        found.keep(attempt)
    found.try_single(precisions, tried)
    heavy = [precision for precision in precisions if known.is_heavy(precision)]
    found.try_all(each_with(heavy, tried.weights))
    found.turn_dials(precisions)
    found.try_all(each_with(precisions, tried.pairs))
    found.try_all(each_with(heavy, tried.beside_weights))
    found.try_without_scale(gpu)
    if splitter() not in config.memory.tricks:
        found.try_split(precisions, heavy, tried)
    if known.recipes and not known.has_fitting:
        found.shrink_smallest()
    ranked = rank(known.recipes)
    if largest_batch and ranked and ranked[0].fits:
        ranked = found.with_largest(ranked)
    return Search(ranked, found.refused, known.hopeless)


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
        self.session, self.config = session, config
        self.budget_bytes, self.on_answer = budget_bytes, on_answer
        self.dialled = [
            one for one in reliefs("activations", "weights") if allow_lossy or not one.is_lossy
        ]
        self.known = Known(budget_bytes, allow_lossy)
        self.refused: list[tuple[Patch, str]] = []
        self._seen = [config.to_data()]

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
                self.known.hopeless.append(patch)
            else:
                self.refused.append((patch, answer.error))
            return
        plan = answer.found
        self.known.recipes.append(Recipe(patch, changed, plan))
        if plan.growing is not None and plan.growing.fits:
            patch = joined(
                patch, {one.name: one.proposals[0] for one in reliefs("fragmentation")[:1]}
            )
            grown = patched(self.config, patch, self.session.allow)
            self.known.recipes.append(
                Recipe(patch, grown, replace(plan, **vars(plan.growing)), traced=False)
            )
        self.on_answer(
            sum(one.traced for one in self.known.recipes),
            sum(one.fits for one in self.known.recipes),
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
            attempt = self.submit(patch) if self.known.is_worth_trying(patch) else None
            if attempt is not None:
                pending.append(attempt)
        for attempt in pending:
            self.keep(attempt)

    def try_single(self, precisions: Sequence[Patch], tried: Combinations) -> None:
        """Try each trick alone, first with the fastest precision; none with a precision that another has outdone."""
        for precision in sorted(precisions, key=self.known.seconds_alone):
            if precision and self.known.is_outdone(precision):
                continue
            patches = [joined(precision, tricks) for tricks in tried.single if tricks]
            for attempt in [
                self.submit(patch) for patch in patches if not self.known.is_hopeless(patch)
            ]:
                self.keep(attempt)

    def try_split(
        self, precisions: Sequence[Patch], heavy: Sequence[Patch], tried: Combinations
    ) -> None:
        """Try smaller and smaller micro-batches; the smallest only if nothing fits."""
        for count in (*PARTS, *LAST_RESORT_PARTS):
            if count > self.config.train.batch_size or (
                count in LAST_RESORT_PARTS and self.known.has_fitting
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
        plain = next((one for one in self.known.recipes if not one.patch), None)
        for name in filter(None, names if is_scaled(self.config.precision.mode) else ()):
            mode = {"precision": mode_patch(self.config, name)}
            alone = () if plain is None else (replace(plain, patch=mode),)
            if any(self.known.cannot_win(one, mode) for one in alone):
                continue
            refused = [patch["memory"] for patch, _ in self.refused if set(patch) == {"memory"}]
            patches = [joined(mode, tricks) for tricks in refused]
            self.try_all(one for one in patches if not self.known.is_hopeless(one, alone))

    def turn_dials(self, precisions: Sequence[Patch]) -> None:
        """Find the gentlest number of each dial that fits well, with each precision that does not fit without.

        Their other end is known: a trick's strongest proposal relieves as much as any. If a trick has several dials,
        only the one that led to the fastest recipe is turned further. Exact tricks come first, and of these the ones
        with few dials: a number that takes no time, as copies during the computation do, makes the rest needless.
        """
        plans = {str(one.patch): one for one in self.known.recipes}
        groups = []
        for precision in precisions:
            plain = plans.get(str(precision)) if not self.known.is_outdone(precision) else None
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
                    if not self.known.cannot_win(turn.part, turn.patch(turn.most))
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
        before = len(self.known.recipes)
        self.keep(attempt)
        return self.known.recipes[before] if len(self.known.recipes) > before else None

    def shrink_smallest(self) -> None:
        """If nothing fits, plan the smallest recipe with small micro-batches, to say how far it is off."""
        patch = min(self.known.recipes, key=lambda one: one.total).patch
        if splitter() in patch.get("memory", {}):
            self.keep(self.submit(joined(patch, parted(self.config, LAST_RESORT_PARTS[0]))))
