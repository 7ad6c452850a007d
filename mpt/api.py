"""The interface of `import mpt`: the work of the commands from Python, and the pieces for a training loop of your own.

    config = mpt.load("configs/classify_digits.yaml", "precision=bf16", "train.steps=200")
    run = mpt.train(config)
    print(run.figures["accuracy"])

A configuration is checked once, by `load`; everything else takes the `Config` that it returns. Mistakes are raised as
`mpt.errors.MptError`, whose message is the one that the command would print. Torch is imported when it is first needed.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from mpt.config.finding.part_packages import use_parts
from mpt.config.load import load_config
from mpt.config.schema import Config

if TYPE_CHECKING:
    from mpt.doctor.findings import Section
    from mpt.engine.step.step import Update
    from mpt.planner.recipes.own_step import OwnPlanned
    from mpt.planner.recipes.planned import Planned
    from mpt.report.comparing.comparison import Comparison
    from mpt.report.reading.run_record import RunRecord
    from mpt.seams import Batch, Dataset, Inference, Run
    from mpt.workflows.comparing.sides import Side
    from mpt.workflows.examining.partings import Parted
    from mpt.workflows.examining.resume_check import ResumeCheck

PathLike = str | Path


def load(
    source: PathLike | Mapping[str, Any],
    *overrides: str,
    patches: Sequence[PathLike] = (),
    allow: Sequence[str] = (),
    parts: Iterable[PathLike] = (),
) -> Config:
    """Read a configuration from a YAML file, YAML text or plain values, and check it.

    `overrides` are `key.path=value`, and `patches` YAML files laid over the source, as on the command line. `parts` are
    folders with parts of your own, which this process knows from then on. `allow` names packages whose models may be
    used. Raises ConfigError with a line for each mistake.
    """
    use_parts(parts)
    return load_config(source, overrides, allow=allow, patches=[Path(patch) for patch in patches])


@dataclass(frozen=True)
class Built:
    """A configuration as objects: networks, optimizers and data, ready for a loop."""

    run: Run
    train_data: Dataset
    test_data: Dataset
    total_steps: int

    @property
    def modules(self) -> dict[str, Any]:
        """The networks by name, moving averages included."""
        return dict(self.run.task.modules)

    def batches(self, from_step: int = 0) -> Iterator[Batch]:
        """Yield the batch of each step on the run's device, without end: the same ones that `mpt.train` takes."""
        from mpt.data.loading.loader import prefetch
        from mpt.engine.loop.assembly import supply_batches

        config = self.run.config
        loader = supply_batches(
            config, self.train_data, self.run.device, config.dataset.settings.workers
        )
        return prefetch(loader.batches(from_step), self.run.device, self.run.data)

    def evaluate(self) -> dict[str, float]:
        """Return the task's figures on the test set. The training is not disturbed."""
        from mpt.engine.state.evaluation import evaluate

        return evaluate(self.run, self.test_data, self.run.config.train.batch_size)

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of all that a training consists of: networks, optimizers, loss scales, random generators."""
        from mpt.engine.state.state import capture

        # optimizers take the tensors of a state that they load for their own
        return copy.deepcopy(capture(self.run))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put a state back. Raises CheckpointError if it does not fit."""
        from mpt.engine.state.state import restore

        restore(self.run, state)


def build(config: Config, device: str | None = None) -> Built:
    """Build a configuration's data, networks, precision mode, memory tricks and optimizers on a device.

    The device is the configuration's own by default. Raises the errors that the configuration raises at the start of a
    run.
    """
    from mpt.engine.building.torch_settings import prepare_torch

    if device is not None:
        config = dataclasses.replace(
            config, train=config.train.model_copy(update={"device": device})
        )
    prepare_torch(config)
    from mpt.engine.loop.assembly import build_explained, supply

    supplied = supply(config)
    run = build_explained(config, supplied.device, supplied.train_data.spec)
    return Built(run, supplied.train_data, supplied.test_data, supplied.total_steps)


def update(built: Built, batch: Batch, step: int) -> dict[str, Update]:
    """Train one step, counted from 0: every phase that is due, at the step's learning rate.

    Returns the update of each phase. This is `mpt.train`'s own step, without its recoveries: a loss that is not
    finite is reported (`Update.finite`), and running out of memory raises.
    """
    from mpt.data.loading.loader import to_device
    from mpt.engine.state.moving_averages import follow_step
    from mpt.engine.step import step as engine
    from mpt.optim.shared.schedules import set_learning_rates
    from mpt.seams.task_kinds import rate_factor

    run = built.run
    batch = to_device(batch, run.device, run.data)
    set_learning_rates(
        run.optimizers, run.optimizer_settings, step, built.total_steps, rate_factor(run.task)
    )
    due = [phase for phase in run.phases if phase.is_due(step)]
    done = {phase.name: engine.update(run, phase, batch) for phase in due}
    follow_step(run, step)
    return done


def train(
    config: Config,
    *,
    runs: PathLike = "runs",
    resume: PathLike | None = None,
    exact: bool = False,
    quiet: bool = True,
) -> RunRecord:
    """Train a configuration in a run's folder below `runs`, as `mpt train` does, and return its record.

    `resume` is "auto" or a run or a checkpoint to continue from; with `exact`, a resume that would not be bit-exact is
    refused. Raises the error that ends the command: Interrupted after a saved SIGINT, NonFiniteError,
    MemoryBudgetError, ...
    """
    from mpt.report.reading.read_run import read_run
    from mpt.run.process.launch import refuse_several_processes
    from mpt.workflows.training import train as workflow
    from mpt.workflows.training.retry import IN_PYTHON

    refuse_several_processes("mpt.train(), unlike `mpt train`,")
    path = workflow.train(
        config,
        runs=Path(runs),
        resume_from=None if resume is None else str(resume),
        exact=exact,
        style="quiet" if quiet else "auto",
        retry=IN_PYTHON,
    )
    assert path is not None
    return read_run(path)


def plan_step(
    build: Callable[..., Any] | str,
    *,
    words: Sequence[str] = (),
    vram: str | None = None,
    gpu: str | None = None,
    desktop: str | None = None,
    largest: bool = False,
    **arguments: Any,
) -> OwnPlanned:
    """Predict the peak memory and step time of a training step of your own, which need not know mpt.

    `build` is at the top level of a file. Called with `arguments`, it builds networks, optimizers and data as the
    training does, and returns the step: a function without arguments, or (model, optimizer, batch, step). A script's
    path is executed as it stands, with `words` for its command line, and stopped after two steps. `largest` looks for
    the largest `batch_size` argument, or batch size among the words, that fits. The ways to need less are in the
    result's `ways`. Nothing is computed: the step runs on fake tensors in another process. Raises ConfigError and
    PlanError, with module and line for steps that cannot be planned.
    """
    from mpt.planner.recipes.own_step import plan_own_step

    return plan_own_step(
        build, arguments, words=words, vram=vram, gpu=gpu, desktop=desktop, largest=largest
    )


def plan(
    config: Config,
    vram: str | None = None,
    gpu: str | None = None,
    desktop: str | None = None,
) -> Planned:
    """Predict a configuration's peak memory and step time on a GPU that need not be here, as `mpt plan` does.

    With `vram` ("6GiB") recipes are searched: `.best` is the fastest that fits, None if none does. Raises
    ConfigError for an unknown GPU or budget, MemoryBudgetError for a budget that not even the weights fit.
    """
    from mpt.planner.recipes.planned import make_plan

    return make_plan(config, vram=vram, gpu=gpu, desktop=desktop)


def compare(
    config: Config | Sequence[PathLike],
    *modes: str,
    variants: Sequence[str] = (),
    seeds: int | None = 3,
    until_decided: bool = False,
    max_seeds: int = 16,
    margin: str = "1%",
    name: str | None = None,
    runs: PathLike = "runs",
    quiet: bool = True,
    jobs: int | None = None,
) -> Comparison:
    """Train with the same seeds and data, and judge, as `mpt compare`.

    The sides: a configuration under several precision modes, or with settings changed by `variants`
    (`"optimizer.lr=1e-3"`); or, as a list, two or more configuration files, or finished runs. With `until_decided`
    seeds are added until every verdict is in, up to `max_seeds`. `jobs` is how many runs at a time, by default as many
    as cores or cards are free. The same call continues with a comparison that was interrupted.
    """
    from mpt.workflows.comparing import compare as workflow
    from mpt.workflows.comparing.compare_sides import read_sides
    from mpt.workflows.comparing.sides import is_config

    if isinstance(config, Config):
        sides = read_sides(modes, config, variants=variants, allow=config.granted)
    else:
        words = [str(one) for one in config]
        if not any(is_config(word) for word in words):
            from mpt.report.reading.read_run import read_run
            from mpt.run.records.layout import find_run

            records = [read_run(find_run(word, Path(runs))[0].path) for word in words]
            return workflow.compare_finished(records, margin, None, name, Path(runs))[0]
        sides = read_sides([*words, *modes], variants=variants)
    return workflow.compare(
        sides,
        seeds=None if until_decided else seeds,
        until_decided=until_decided,
        max_seeds=max_seeds,
        margin=margin,
        name=name,
        runs=Path(runs),
        quiet=quiet,
        jobs=jobs,
    )[0]


def doctor(
    subject: Config | PathLike | None = None,
    *,
    words: Sequence[str] = (),
    only: Sequence[str] = (),
    dtype: str | None = None,
    batch_size: int | None = None,
    points: int = 4,
    runs: PathLike = "runs",
    allow: Sequence[str] = (),
) -> list[Section]:
    """Examine a configuration, a run or a checkpoint, or without one this machine, as `mpt doctor` does.

    A training of your own is examined by the name of its script, `train.py` with `words` for its command line, or of
    the function that builds its step, `FILE.py:FUNCTION` or `package.module:function`, without arguments.

    `only` chooses among environment, data, numerics and speed. Returns a section for each, with findings (`level` is
    ok, note, warning or fault) and tables; the table `cure` of the numerics has the patch that was tried. Nothing is
    written.
    """
    from mpt.planner.recipes.own_step import find_source, is_own
    from mpt.workflows.examining.examination import (
        BEGINNING,
        PARTS,
        Wish,
        check_parts,
        choose_points,
        examine_parts,
    )
    from mpt.workflows.examining.own_examination import OwnWish, examine_own

    if isinstance(subject, str) and is_own(subject):
        source = find_source(subject, allow, words)
        return examine_own(OwnWish(subject, source, {}, dtype, runs=Path(runs)), only)
    wanted = check_parts(
        only or (PARTS if subject is not None else ("environment",)),
        has_subject=subject is not None,
    )
    wish = Wish(subject if isinstance(subject, str) else "CONFIG", dtype, batch_size, Path(runs))
    if subject is None:
        return examine_parts(wanted, wish, None, [])
    side = _side(subject, runs, allow)
    chosen = [BEGINNING] if side.run is None else choose_points(side.run, side.checkpoint, points)
    return examine_parts(wanted, wish, side.config, chosen)


def diff(
    first: Config | PathLike,
    second: Config | PathLike,
    *,
    steps: int = 10,
    dtype: str | None = None,
    only_files: bool = False,
    runs: PathLike = "runs",
    allow: Sequence[str] = (),
) -> Parted:
    """Find the point at which two configurations or runs first part, as `mpt diff` does; a precision mode is the first
    in it.

    The result has a `verdict` (same, rounding, apart or not finite), the differences of the runs' files (`files`) and
    those of training both side by side (`replayed`, with `bits` and `beyond`).
    """
    from mpt.workflows.comparing.sides import Side, resolve_mode, vary
    from mpt.workflows.examining.partings import compare_sides

    one = _side(first, runs, allow)
    if isinstance(second, str) and resolve_mode(second) is not None and not Path(second).exists():
        config = vary(
            one.config,
            f"precision={second}",
            allow,
            lambda more: load_config(one.config.to_data(), more),
        )
        other = Side(second, config)
    else:
        other = _side(second, runs, allow)
    return compare_sides(one, other, steps=steps, dtype=dtype, only_files=only_files)


def verify_resume(
    config: Config | PathLike,
    *,
    steps: int = 20,
    kill: bool = False,
    runs: PathLike = "runs",
    allow: Sequence[str] = (),
) -> ResumeCheck:
    """Check that a training that is stopped and resumed ends bit for bit as in one go, as `mpt verify-resume` does.

    The result has `same`, `text`, the differences (`files`) and the lost state (`cause`).
    """
    import tempfile

    from mpt.workflows.examining.resume_check import Check
    from mpt.workflows.examining.resume_check import verify_resume as verify

    side = _side(config, runs, allow)
    with tempfile.TemporaryDirectory(prefix="mpt-verify-resume-") as folder:
        granted = [*allow, *side.config.granted]
        return verify(side.config, Path(folder), Check(steps, kill, granted, lambda text: None))


def _side(what: Config | PathLike, runs: PathLike, allow: Sequence[str]) -> Side:
    """Return a configuration, or read the one that a path or name refers to."""
    from mpt.workflows.comparing.sides import Side
    from mpt.workflows.examining.partings import read_with_own_parts

    if isinstance(what, Config):
        return Side("the configuration", what)
    return read_with_own_parts(str(what), [], Path(runs), allow)


def infer(
    run: PathLike | None = None,
    inputs: Sequence[PathLike] = (),
    *,
    half: bool = False,
    dtype: str | None = None,
    batch_size: int | None = None,
    seed: int | None = None,
    truncation: float | None = None,
    checkpoint: Literal["best", "newest"] | int | None = None,
    device: str | None = None,
    runs: PathLike = "runs",
    allow: Sequence[str] = (),
    parts: Iterable[PathLike] = (),
) -> list[Inference]:
    """Let a run's networks infer, and return the results of each batch; nothing is written.

    `run` is a run or a checkpoint, the newest run by default; `inputs` are files, folders or `FIELD=PATH`. Without
    inputs, test samples stand in for a task that needs some. `checkpoint` is the run's best by its metric if it was
    evaluated, "newest", or a step. `half` stores the weights in half precision.
    """
    from mpt.inference import opening
    from mpt.inference.half import choose_half, rebuild_half

    use_parts(parts)
    trained, samples = opening.open_with_inputs(
        None if run is None else str(run),
        [str(one) for one in inputs],
        as_trained=not (half or dtype),
        truncation=truncation,
        seed=seed,
        device=device,
        runs=Path(runs),
        allow=allow,
        which=checkpoint,
    )
    if half:
        choice = choose_half(dtype, trained.run.device)
        trained = dataclasses.replace(trained, run=rebuild_half(trained, choice.dtype))
    else:
        trained = opening.in_dtype(trained, dtype)
    return list(opening.infer(trained, samples, batch_size or trained.config.train.batch_size))
