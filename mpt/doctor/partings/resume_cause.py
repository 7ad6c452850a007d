"""Why a resume is not exact: changes in a training that are in no state, found in one process and tried.

A training takes some steps, and its state is put into a second one that was just built, as a resume does. What the two
hold alongside their state is compared, and the next batch. Then each difference is carried over to a fresh one: if the
next step is the first's after that, this is the cause.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from types import ModuleType
from typing import Any

from mpt.config.finding.part_packages import IMPORT_HOME
from mpt.config.schema import Config
from mpt.doctor.partings.difference import differing
from mpt.doctor.partings.hidden_state import PLAIN, Hidden, hidden_state, token
from mpt.doctor.partings.lockstep import Training
from mpt.doctor.partings.side_by_side import take
from mpt.engine.building.build import build_datasets
from mpt.engine.building.devices import choose_device
from mpt.outside.own_code import is_own_file

MOST_NAMED = 4
MOST_TRIED = 12
"""Values that are carried over one by one."""


@dataclass
class Cause:
    """Results of a search. All are empty if the resume is exact in one process."""

    step: int
    """At which the training was stopped."""
    batch: list[str] = field(default_factory=list)
    """The fields of the next batch that are others already."""
    causes: list[str] = field(default_factory=list)
    """The attributes that make the next step the same once they are carried over: name, and values in both."""
    suspects: list[str] = field(default_factory=list)
    """Other attributes that changed in the training and are in no state."""
    module_values: list[str] = field(default_factory=list)
    """Values of modules of your own that the steps changed: another process begins with the first."""

    def to_record(self) -> dict[str, Any]:
        """Return it as JSON can hold it."""
        return asdict(self)

    def describe(self) -> str:
        """Return it in a sentence; "" if nothing was found."""
        parts = []
        if self.causes:
            parts.append(
                f"because of {some(self.causes)}, which is in no state; carried over, the next step is the same"
            )
        elif self.suspects:
            parts.append(f"in no state and changed by training: {some(self.suspects)}")
        if self.module_values:
            parts.append(f"values of modules that training changed: {some(self.module_values)}")
        if self.batch:
            fields = ", ".join(self.batch)
            parts.append(
                f"the batch differed already ({fields}): a sample may depend on seed, epoch and index alone"
            )
        elif parts:
            parts.append("the batch was the same")
        return "; ".join(parts)


def some(names: Sequence[str]) -> str:
    """Return the first of some names in words."""
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(names[:MOST_NAMED]) + more


def find_cause(config: Config, step: int) -> Cause:
    """Take steps up to `step`, continue from the state in a training that was just built, and report the losses."""
    whole = build(config)
    before = {name: module_values(module) for name, module in own_modules().items()}
    for number in range(step):
        take(whole, number, whole.batch(number))
    found = Cause(step, module_values=list(changed_values(before)))
    state = whole.snapshot()
    resumed = build(config)
    resumed.restore(state)
    lost = lost_values(whole, resumed)
    batches = whole.batch(step), resumed.batch(step)
    found.batch = differing(*batches)
    goal = take(whole, step, batches[0])

    def arrives(names: Sequence[str]) -> bool:
        """Return whether the next step is the one without a stop, with some values carried over."""
        training = build(config)
        training.restore(state)
        own = hidden_state(training)
        for name in names:
            owner, _, attribute = name.rpartition(".")
            place = own[name] if name in own else Hidden(own[owner].owner, attribute, None)
            place.put(lost[name].frozen)
        return take(training, step, training.batch(step)) == goal and not differing(
            whole.weights(), training.weights()
        )

    if arrives([]):
        return found
    causes = [name for name in list(lost)[:MOST_TRIED] if arrives([name])]
    if not causes and len(lost) > 1 and arrives(list(lost)):
        causes = list(lost)
    found.causes = [lost[name].text for name in causes]
    found.suspects = [one.text for name, one in lost.items() if name not in causes]
    return found


def build(config: Config) -> Training:
    """Return a training at its beginning."""
    return Training(config, choose_device(config.train.device), build_datasets(config)[0])


@dataclass(frozen=True)
class Lost:
    """A value that a resume loses."""

    text: str
    frozen: Any


def lost_values(whole: Training, resumed: Training) -> dict[str, Lost]:
    """Return the differences of two trainings of one state, with the first one's values."""
    before, found = hidden_state(resumed), {}
    for name, kept in hidden_state(whole).items():
        if name in before and token(kept.value) == token(before[name].value):
            continue
        is_known = name in before or name.rpartition(".")[0] in before
        if is_known:
            then = before[name].show() if name in before else "not there"
            found[name] = Lost(f"{name} ({kept.show()}, after a resume {then})", kept.freeze())
    return found


def own_modules() -> dict[str, ModuleType]:
    """Return the imported modules that are the user's own."""
    files = {name: vars(module).get("__file__") for name, module in list(sys.modules.items())}
    return {
        name: sys.modules[name]
        for name, file in files.items()
        if isinstance(file, str) and is_own_file(file)
    }


def module_values(module: ModuleType) -> dict[str, Any]:
    """Return the plain global values of a module."""
    return {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, PLAIN) and not name.startswith("__")
    }


def changed_values(before: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yield the global values of modules that are others than before."""
    for name, values in before.items():
        now = module_values(sys.modules[name])
        for key, value in values.items():
            if repr(now.get(key)) != repr(value):  # NaN is not equal to itself
                short = name.removeprefix(f"{IMPORT_HOME}.")
                yield f"{short}.{key} ({value!r} at the beginning, then {now.get(key)!r})"
