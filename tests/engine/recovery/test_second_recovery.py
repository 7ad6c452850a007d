"""What holds after a recovery, two of them in a row, and the bound of each. Bounds are written out as numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mpt.engine.loop import loop, rollback
from mpt.engine.loop.training import Training
from mpt.engine.recovery import recovery
from mpt.engine.recovery.collapse import CollapseWatch, Streak
from mpt.engine.recovery.recent_states import RecentStates
from mpt.engine.recovery.remedies import Remedies
from mpt.engine.state.progress import Progress
from mpt.engine.step.step import Update, update
from mpt.errors import NonFiniteError
from mpt.parallel.world import ALONE
from mpt.run.checkpoints.retention import list_steps
from mpt.run.records.layout import create_run
from mpt.seams import Run, StepStats
from mpt.tasks.classify import Classify
from tests.engine import parts
from tests.engine.recovery.test_recovery import (
    assert_clean,
    clean_weights,
    events,
    poison,
    settings,
    start,
)

NAN = float("nan")
HALF = {"mode": "amp", "dtype": "float16", "init_scale": 64.0, "min_scale": 8.0}


def classifier(precision: Any = "fp32", **train: Any) -> Run:
    return parts.classifier(precision, train={"steps": 4, "batch_size": 8, **train})


def test_ten_steps_in_a_row_may_be_skipped_and_none_with_a_weight_that_is_not_finite() -> None:
    run = classifier(on_non_finite="skip", max_rollbacks=2)

    def action(in_a_row: int) -> str:
        return recovery.after_non_finite(run, run.phases[0], 5, in_a_row, 0).action

    assert [action(n) for n in (1, 10, 11)] == ["go_on", "go_on", "stop"]
    next(run.phases[0].module.parameters()).detach().fill_(NAN)
    assert action(1) == "roll_back"


@pytest.mark.parametrize("decide", ["non_finite", "poisoned"])
def test_there_are_as_many_rollbacks_as_are_allowed(decide: str) -> None:
    run = classifier(max_rollbacks=2)
    kinds: dict[str, Callable[[int], recovery.Decision]] = {
        "non_finite": lambda rollbacks: recovery.after_non_finite(
            run, run.phases[0], 5, 1, rollbacks
        ),
        "poisoned": lambda rollbacks: recovery.with_poisoned_state(run, "net.weight", rollbacks),
    }
    assert [kinds[decide](rollbacks).action for rollbacks in (0, 1, 2)] == [
        "roll_back",
        "roll_back",
        "stop",
    ]


def test_the_third_overflow_at_the_floor_counts_and_overflows_between_clean_steps_do_not() -> None:
    run = classifier(HALF)
    scaler, done = run.precision.scalers["net"], {"net": Update(StepStats())}
    actions = []
    for overflows in (True, True, False, True, True, True):  # one before the floor, then at it
        scaler.scale = 8.0
        scaler.update(overflows)
        actions.append(recovery.at_floor(run, done).action)
    assert actions == ["go_on"] * 5 + ["stop"]


def test_a_remedy_among_repetitions_is_one() -> None:
    assert recovery.has_remedy(classifier(after_rollback=["repeat", "halve_lr"]))
    assert not recovery.has_remedy(classifier(after_rollback=["repeat"]))


def test_the_first_rollback_takes_the_first_remedy_and_the_last_one_stays() -> None:
    train, remedies = (
        classifier(after_rollback=["skip_batch", "halve_lr"], halved_steps=10).config.train,
        Remedies(),
    )
    assert remedies.choose(train, 4, 1) == "the batch of step 4 is passed over"
    assert [remedies.choose(train, 5, n)[:14] for n in (2, 3)] == ["learning rates"] * 2


def test_a_second_halving_multiplies_while_the_first_holds_and_begins_anew_after_it() -> None:
    train, remedies = classifier(halved_steps=10).config.train, Remedies()
    remedies.halve_rates(train, 5)
    assert [remedies.rate_at(step) for step in (5, 14, 15)] == [0.5, 0.5, 1.0]
    remedies.halve_rates(train, 8)
    assert [remedies.rate_at(step) for step in (8, 17, 18)] == [0.25, 0.25, 1.0]
    remedies.halve_rates(train, 100)
    assert remedies.rate_at(100) == 0.5


def test_modules_go_to_float32_as_often_as_rollbacks_are_allowed() -> None:
    config = classifier({**HALF, "auto_keep_fp32": True}, max_rollbacks=2).config
    assert [Remedies(float32_times=times).may_keep_more(config) for times in (0, 1, 2)] == [
        True,
        True,
        False,
    ]


def test_what_is_kept_in_float32_at_the_floor_begins_anew_with_the_scale(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = classifier({**HALF, "auto_keep_fp32": True}, max_rollbacks=2)
    scaler, training = run.precision.scalers["net"], SimpleNamespace(run=run, remedies=Remedies())
    scaler.scale, scaler.overflows_at_floor = 8.0, 3
    for name in ("whole_batch", "blame", "list_that_makes_finite", "keep_more"):
        monkeypatch.setattr(rollback, name, lambda *_: SimpleNamespace(text="net.head"))
    decision = recovery.Decision("stop", phase=run.phases[0], why="the scale is at its floor")
    assert rollback.keep_at_floor(training, decision, Update(StepStats()))  # type: ignore[arg-type]
    assert (scaler.scale, scaler.overflows_at_floor) == (64.0, 0)


def test_single_steps_that_are_not_finite_are_skipped_however_many_and_ten_in_a_row_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = settings(steps=26, batch_size=16, on_non_finite="skip", checkpoint_every=0)
    with monkeypatch.context() as patch:
        poison(patch, lambda call: call % 2 == 1)
        path = start(tmp_path / "single", train=train)
    assert [event["kind"] for event in events(path)].count("non_finite") == 13
    poison(monkeypatch, lambda call: call >= 2)
    with pytest.raises(NonFiniteError, match="10 steps in a row were not finite"):
        start(tmp_path / "all", train=train)
    found = [
        event["step"] for event in events(tmp_path / "all" / "run") if event["kind"] == "non_finite"
    ]
    assert found == list(range(2, 13))


def test_a_second_failure_at_the_same_step_returns_to_an_older_state_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = settings(checkpoint_every=0, recent_states=2, recent_every=2)
    clean_weights()
    # each is repeated once, to find what was not finite first
    poison(monkeypatch, lambda call: call in (5, 8))
    path = start(tmp_path / "poisoned", train=memory)
    told = [event["message"] for event in events(path) if event["kind"] == "rollback"]
    returns = ["rolled back from step 5 to 4", "rolled back from step 5 to 2"]
    assert [message.rpartition(": ")[2] for message in told] == returns
    assert_clean(path)


def test_a_state_that_was_poisoned_once_is_rolled_back_at_the_save_and_the_run_equals_a_clean_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clean_weights()
    original, done = Classify.after_step, []

    def after_step(self: Classify, step: int, samples_seen: int) -> None:
        original(self, step, samples_seen)
        if step == 5 and not done:
            done.append(step)
            self.net.stages[0][1].running_mean.fill_(NAN)  # type: ignore[index, operator, union-attr]

    monkeypatch.setattr(Classify, "after_step", after_step)
    path = start(tmp_path / "poisoned")
    kinds = [event["kind"] for event in events(path) if event["kind"] in ("poisoned", "rollback")]
    assert kinds == ["poisoned", "rollback"]
    assert_clean(path)


def test_after_the_fall_back_to_bfloat16_a_loss_that_is_not_finite_steps_nothing() -> None:
    run = classifier(HALF)
    phase = run.phases[0]
    assert run.precision.fall_back(run.task)
    before = [parameter.detach().clone() for parameter in phase.module.parameters()]
    batch = parts.batch()
    batch["image"][3] = NAN
    done = update(run, phase, batch)
    assert not done.finite
    assert all(map(torch.equal, phase.module.parameters(), before))
    assert update(run, phase, parts.batch(1)).finite


def training(**changes: Any) -> Any:
    """Return what a rollback needs of a training at step 6 that has collapsed, in place of a real one."""
    train = SimpleNamespace(max_rollbacks=2, halved_steps=10)
    told: list[str] = []
    journal = SimpleNamespace(
        event=lambda kind, message: told.append(kind),
        warn=lambda message, kind: told.append(kind),
        recorder=SimpleNamespace(
            truncate_after=lambda step, keep_events: told.append(f"lines after {step} dropped")
        ),
        console=SimpleNamespace(warning=lambda message: None),
    )
    made = SimpleNamespace(
        told=told,
        train=train,
        run=SimpleNamespace(world=ALONE),
        journal=journal,
        progress=SimpleNamespace(step=6),
        saver=SimpleNamespace(finish=lambda: None, newest=6),
        remedies=Remedies(rate=0.5, rate_until=99),
        recent=RecentStates(4, 2),
        rollbacks=0,
        collapse="all alike",
        sound_step=3,
    )

    def put_back(state: dict[str, Any]) -> None:
        made.progress.step, made.remedies = state["step"], Remedies()

    made.put_back = put_back
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def test_a_state_that_is_put_back_brings_nothing_along_of_the_steps_that_are_abandoned() -> None:
    run = classifier(HALF)
    one = Training.__new__(Training)  # only what a state is put back into
    one.run, one.progress, one.remedies = run, Progress(step=3), Remedies()
    one.collapse, one.collapse_watch, one.grad_norms, one.sound_step = (
        None,
        CollapseWatch.of(run),
        {},
        3,
    )
    state = one.state_in_memory()
    one.progress, one.collapse, one.sound_step = Progress(step=6), "all alike", 5
    one.grad_norms = {"net": torch.tensor(NAN)}
    assert one.collapse_watch.is_new("alike")
    one.put_back(state)
    assert (one.progress.step, one.sound_step, one.collapse, one.grad_norms) == (3, 3, None, {})
    assert one.collapse_watch.is_new("alike"), "a second collapse would not be told"


def keep(ring: RecentStates, *steps: int) -> None:
    for step in steps:
        ring.keep(step, {"modules": {}, "step": step})


def test_states_after_the_one_that_was_returned_to_are_forgotten_and_remedies_are_not() -> None:
    one = training()
    keep(one.recent, 2, 3, 4, 6)
    rollback.go_back(one, "why", {"step": 3})
    assert [step for step, _ in one.recent.states] == [2, 3]
    assert one.remedies.rate_at(7) == 0.5
    assert one.rollbacks == 1
    assert one.told == ["lines after 3 dropped", "rollback"]
    keep(one.recent, 4)
    rollback.roll_back(
        training(recent=one.recent, saver=SimpleNamespace(finish=lambda: None, newest=None)), "why"
    )
    assert [step for step, _ in one.recent.states] == [2, 3], (
        "a state that was returned to is the next one's no more"
    )


def test_a_second_collapse_returns_to_another_state_than_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = create_run(tmp_path, "run")
    for step in (2, 4, 6):
        (directory.checkpoints / f"step-{step:08d}").mkdir(parents=True)
    one = training(directory=directory)
    one.recent.keep_sound(3, {"modules": {"net": {"weight": torch.tensor(NAN)}}, "step": 3})
    assert one.recent.sound is None, "what is not finite is not sound"
    one.recent.keep_sound(3, {"modules": {}, "step": 3})
    assert rollback.return_from_collapse(one)
    assert one.progress.step == 3
    assert one.recent.sound is None
    assert (one.saver.newest, list_steps(directory)) == (2, [2]), (
        "a resume goes on from before the collapse"
    )
    assert one.remedies.rate_at(6) == 0.25
    one.collapse, one.progress.step = "again", 6
    loaded = SimpleNamespace(step=2, notes=[])
    monkeypatch.setattr(rollback.checkpoint, "load", lambda *_: loaded)
    one.load = lambda found: one.put_back({"step": found.step})
    assert rollback.return_from_collapse(one)
    assert one.progress.step == 2
    one.collapse = "a third time"
    assert not rollback.return_from_collapse(one), "max_rollbacks is 2"


def test_a_sign_counts_at_the_third_look_in_a_row_and_from_the_step_that_is_named() -> None:
    streak = Streak()
    assert [streak.seen(now) for now in (True, True, False, True)] == [1, 2, 0, 1]
    run = classifier(collapse={"after": 100, "patience": 3, "diversity": 0.25})
    for variety, expected in ((0.2, [0, 0, 1]), (0.25, [0, 0, 0])):
        watch = CollapseWatch(run.config.train.collapse, ("disc", "gen"), True)
        watch.measure = lambda run, dataset, variety=variety: variety  # type: ignore[method-assign]
        found = [watch.look_at_samples(run, step, None) for step in (100, 101, 102)]  # type: ignore[arg-type]
        assert [len(signs) for signs in found] == expected
    assert watch.look_at_samples(run, 99, None) == {}  # type: ignore[arg-type]


def test_the_data_go_on_from_the_step_that_a_collapse_returned_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = SimpleNamespace(
        progress=SimpleNamespace(step=6, best_step=0),
        recent=SimpleNamespace(every=0),
        train=SimpleNamespace(log_every=0),
        collapse="all alike",
        look_at_samples=lambda: None,
    )
    monkeypatch.setattr(loop, "evaluate_and_sample", lambda training: False)
    monkeypatch.setattr(loop, "return_from_collapse", lambda training: True)
    assert loop.do_side_jobs(one, None, loop.Window(0), 9) is False  # type: ignore[arg-type]
