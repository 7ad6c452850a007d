"""Contents of a configuration once it is read: frozen sections, every default filled in.

`mpt.config.load` makes a `Config` from YAML; nothing else does, so that no value reaches a run unchecked.
`Config.to_yaml` writes every setting, defaults included, and reads back to an equal `Config`: a run's record does not
change its meaning when a default does.

The sections' own settings belong to the plugins (`mpt.config.finding.registry`); only settings of every run are
declared here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from mpt.config.finding.registry import Plugin
from mpt.config.options import Options, setting_of
from mpt.config.periods import AUTO, Period
from mpt.config.sizes import parse_budget
from mpt.config.text.yaml_text import write_text
from mpt.errors import ConfigError

RUN_NAME = re.compile(r"[\w-](?:[\w. -]{0,98}[\w.-])?")
NUMBERED_DEVICES = ("cuda", "xpu", "hpu", "mtia", "npu")
"""Kinds of accelerators of which a machine may have several; whether torch has one is found out when a run starts."""
NAMED_SECTIONS = {"model": "nn", "task": "tasks", "dataset": "data", "optimizer": "optim"}
"""Sections that choose a plugin by `name`, and its subpackage."""


class EarlyStopping(Options):
    """Ending a training before its last step, when evaluations get no better."""

    metric: str | None = None
    """The figure of the evaluations to watch; null takes the task's own, by which the best checkpoint is chosen."""
    patience: int = Field(5, ge=1)
    """After that many evaluations in a row without a better figure the training ends."""
    min_delta: float = Field(0.0, ge=0)
    """By how much a figure must be better than the best so far to count."""
    mode: Literal["auto", "min", "max"] = "auto"
    """Whether lower or higher is better; auto knows it of the task's own metric."""


class Collapse(Options):
    """When a game between networks counts as collapsed, for `on_collapse`. Tasks without a discriminator have no use
    for it."""

    after: int = Field(500, ge=0)
    """Steps before which nothing counts: in any young run samples are alike and discriminators ahead."""
    samples: int = Field(64, ge=0)
    """Samples of the same latents that are made at each look, to see how varied they are; 0 makes none."""
    every: int = Field(100, gt=0)
    """Steps between two looks at samples. Losses and loss scales are looked at when they are logged."""
    diversity: float = Field(0.3, ge=0)
    """Samples whose features vary less than this share of the data's are a sign of collapse; at an evaluation, which
    looks at more of them, once is enough."""
    won: float = Field(0.01, ge=0)
    """Loss below which a discriminator has won, if its loss cannot be negative; seen once it counts."""
    ratio: float = Field(10.0, ge=0)
    """The losses are a sign if that of the discriminator over the generator's is that many times outside of the
    range that it had; 0 does not look. For losses that cannot be negative."""
    patience: int = Field(5, ge=1)
    """After that many looks in a row a sign counts: samples alike, a loss scale at its floor or falling, losses
    apart."""


class MovingAverage(Options):
    """A moving average of the weights (EMA), which is evaluated. `ema: 0.999` is `ema: {decay: 0.999}`."""

    decay: float | None = Field(None, gt=0, lt=1)
    """The share of the average that a step leaves. In the first steps it is (1 + step) / (10 + step), if that is less.
    """
    half_life_kimg: float | None = Field(None, gt=0)
    """In place of a decay: thousands of images after which half of an average is new."""
    ramp_steps: float | None = Field(None, ge=0)
    """Steps in which the decay rises from 0 to 63 % of itself, in place of the rise above; 0 is no rise."""
    rampup: float | None = Field(None, gt=0)
    """The half-life is at most this share of the images seen."""
    buffers: Literal["copy", "average"] = "copy"
    """Whether buffers (BatchNorm's statistics) are those of the last step, or averaged too."""

    @model_validator(mode="after")
    def one_speed(self) -> Self:
        """Refuse an average without a decay, and settings that belong to the other way of giving one."""
        if (self.decay is None) == (self.half_life_kimg is None):
            raise ValueError(
                "train.ema has either a decay or a half_life_kimg; null keeps no average"
            )
        if self.decay is None and self.ramp_steps is not None:
            raise ValueError(
                "train.ema.ramp_steps belongs to a decay; with half_life_kimg it is rampup"
            )
        if self.decay is not None and self.rampup is not None:
            raise ValueError(
                "train.ema.rampup belongs to half_life_kimg; with a decay it is ramp_steps"
            )
        return self


class Train(Options):
    """The `train` section: how long, how much at once, and the work in between."""

    steps: int | None = Field(None, gt=0)
    """Optimizer steps to take. Give this or `epochs`; 1000 if neither is."""
    epochs: float | None = Field(None, gt=0)
    """Passes over the training data, fractions allowed. Give this or `steps`."""
    batch_size: int = Field(64, gt=0)
    """The batch that is optimised. `memory.micro_batch` splits it inside the step without changing the result."""
    log_every: int = Field(10, gt=0)
    """Steps between log lines, which have the mean losses of the steps since the line before."""
    evaluate_every: Period = AUTO
    """Steps between evaluations, or epochs: `1 epoch`. auto is an epoch if `epochs` is given (at most 100 times in
    a run), else a tenth of the run; 0 evaluates at the end only."""
    checkpoint_every: Period = 200
    """Steps between checkpoints, or epochs: `1 epoch`; 0 saves at the end only. An evaluation that is the best so far
    saves one too."""
    early_stopping: EarlyStopping | None = None
    """End before the last step when `evaluate_every` finds nothing better any more: `{patience: 5}`."""
    keep_last: int = Field(3, gt=0)
    """How many of the newest checkpoints stay on disk, in addition to the best one. Those that an evaluation saved
    count too."""
    asynchronous_save: bool | None = None
    """Copy the state into host memory and write it during the training; null does so if half of the memory that is
    available holds the copy, and never in several processes, which must set it."""
    sample_every: Period = AUTO
    """Steps between sample grids, the first before training, or epochs: `1 epoch`. auto is as often as evaluations are
    by default; 0 writes one at the end only."""
    keep_samples: int | None = Field(100, gt=0)
    """How many sample grids stay on disk and go to boards, spread evenly over the training, and the newest; null keeps
    all."""
    freeze: list[str] = Field(default_factory=list)
    """Globs over dotted parameter names (`net.layer1.*`) that stay as they were loaded: no gradient, no state."""
    frozen_norm: Literal["eval", "train"] = "eval"
    """Whether frozen BatchNorm layers normalise by the statistics they were loaded with, or by the batch's."""
    ema: MovingAverage | None = None
    """A moving average of the weights, which is evaluated: a decay such as 0.999, or a mapping. Tasks may have
    one by default; null keeps none."""
    on_non_finite: Literal["stop", "skip", "rollback"] = "rollback"
    """At a loss or gradient that is NaN or infinite without a loss scaler to blame: stop, skip the step, or go back."""
    max_rollbacks: int = Field(3, ge=0)
    """After that many returns to a checkpoint the run stops with exit 6."""
    after_rollback: list[Literal["repeat", "skip_batch", "halve_lr"]] = Field(
        default=["repeat"], min_length=1
    )
    """The change at the first, second, ... rollback, the last also at later ones: nothing, the batch that failed
    is passed over, or learning rates are halved for `halved_steps`."""
    halved_steps: int = Field(200, gt=0)
    """For how many steps beyond the one that failed `after_rollback: [halve_lr]` halves the rates."""
    recent_states: int = Field(0, ge=0)
    """How many recent states are kept in host memory to roll back to, in addition to the checkpoints on disk."""
    recent_every: int = Field(20, gt=0)
    """Steps between two of the `recent_states`."""
    on_collapse: Literal["advise", "rollback"] = "advise"
    """If samples have lost their variety, a discriminator has won, or the loss scale or the losses' ratio say so:
    report it, or return to a state from before it and halve the learning rates for `halved_steps`, within
    `max_rollbacks`. With `recent_states` the state of the last evaluation without a sign of collapse is kept in memory
    too; without, a checkpoint from before it is needed."""
    collapse: Collapse = Field(default_factory=lambda: Collapse.model_validate({}))
    """The signs of a collapse."""
    deterministic: bool = True
    """Choose deterministic kernels, so that a resumed run repeats bit for bit. Costs a little speed on GPUs. torch
    has none for the backward of bilinear resizing (DAIN has its own) and sampling (StyleGAN2's augmentation), and
    fused attention is as torch has it: they may add in any order."""
    threads: int | None = Field(None, gt=0)
    """CPU threads; null leaves torch's choice. Results are bit-equal only at a fixed count."""
    tensorboard: bool = False
    """The same as `boards: [tensorboard]`."""
    boards: list[Literal["tensorboard", "wandb", "mlflow"]] = Field(default_factory=list)
    """Boards that log lines, previews and drawn evaluations also go to: TensorBoard, Weights & Biases, MLflow; each
    needs its package (docs/how-to/boards.md)."""
    on_end: str | None = Field(None, min_length=1)
    """A command to run when the training ends, well or not, or an address (https://...) to post to: it gets the summary
    as JSON. A file's own is run only with `--allow on_end`."""
    plan_memory: bool | None = None
    """Plan the peak memory in a process during the training, for the report; null does so on a CUDA device only."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1, xpu (Intel), mps (Apple), or another kind of accelerator that torch has: hpu, mtia, npu.
    auto takes the first one there is, but for Apple's."""

    @model_validator(mode="after")
    def evaluates_to_stop(self) -> Self:
        """Refuse early stopping without the evaluations that it looks at."""
        if self.early_stopping is not None and self.evaluate_every == 0:
            raise ValueError(
                "train.early_stopping looks at evaluations; found train.evaluate_every 0, which has one at the end "
                "only: set it to the steps between two, such as 100, or to 1 epoch"
            )
        return self

    @field_validator("device")
    @classmethod
    def name_a_device(cls, device: str) -> str:
        """Refuse a word that is not the name of a device. Whether this machine has it is seen when the run starts."""
        if not re.fullmatch(
            rf"auto|cpu|mps|({'|'.join(NUMBERED_DEVICES)})(:[0-9]{{1,3}})?", device
        ):
            raise ValueError("a device is auto, cpu, cuda, cuda:NUMBER, xpu, xpu:NUMBER or mps")
        return device


class MemoryOptions(Options):
    """Settings of the `memory` section in addition to its tricks."""

    on_oom: Literal["stop", "adapt"] = "stop"
    """Out of memory in a step: stop with exit 7, or repeat it with smaller micro-batches, recomputed, offloaded."""
    ceiling: str | None = "auto"
    """The most that this process may hold of a CUDA card, its context included: a size such as 6GiB. Beyond it memory
    runs out, which `on_oom` answers. auto: if the driver moves excess allocations into system memory instead of
    refusing them (Windows, WSL), the free memory at the start; elsewhere none. null: none."""

    @field_validator("ceiling")
    @classmethod
    def ceiling_is_a_size(cls, value: str | None) -> str | None:
        """Refuse words that are no amount of memory."""
        if value not in (None, "auto"):
            try:
                parse_budget(value, "memory.ceiling")
            except ConfigError as error:
                said = str(error).removeprefix("memory.ceiling: ")
                raise ValueError(f"{said}, auto or null") from error
        return value


class Parallel(Options):
    """The `parallel` section: how several processes train together. A process alone has no use for it."""

    strategy: Literal["ddp", "fsdp"] = "ddp"
    """ddp: every process has the whole networks. fsdp: each has a part of each weight, gradient and optimizer state."""
    shard: Literal["full", "grad", "hybrid"] = "full"
    """For fsdp. full: gathered weights are released after a layer's forward. grad: after its backward, for more memory
    and less traffic. hybrid: weights are sharded over `shard_ranks` processes, and every such group has all of them."""
    shard_ranks: int | None = Field(None, gt=0)
    """For hybrid: over how many neighbouring processes weights are sharded. null: those of one machine."""
    offload: bool = False
    """For fsdp: keep shards of weights, gradients and optimizer states in host memory, on which the optimizer steps."""
    reduce_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """The dtype in which gradients are summed over processes; auto is the one they are stored in. bfloat16 halves the
    traffic."""
    overlap: bool = True
    """Send gradients while the last backward of an update still computes others."""
    bucket_mib: float = Field(25.0, gt=0)
    """Gradients are sent in buckets of that many MiB."""
    sync_batchnorm: bool = False
    """Let BatchNorm see the samples of all processes; otherwise each its own, and the first one's statistics are saved.
    """
    timeout: float = Field(600.0, gt=0)
    """Seconds after which a process that does not move while others wait for it ends the run."""

    @model_validator(mode="after")
    def shard_with_fsdp(self) -> Self:
        """Refuse a way of sharding if nothing is sharded."""
        if self.strategy == "ddp" and (self.shard != "full" or self.shard_ranks is not None):
            raise ValueError(
                "parallel.shard and shard_ranks are for strategy: fsdp, and it is ddp. Set strategy: fsdp"
            )
        if self.strategy == "ddp" and self.offload:
            raise ValueError(
                "parallel.offload is for strategy: fsdp, and it is ddp; memory.cpu_optimizer is for both"
            )
        if self.shard_ranks is not None and self.shard != "hybrid":
            raise ValueError("parallel.shard_ranks is for shard: hybrid. Set that, or leave it out")
        return self


class GeneralOptions(Options):
    """The settings at the top level."""

    seed: int = Field(0, ge=0, lt=2**63)
    """Every random number of the run follows from it."""
    name: str | None = None
    """The run's folder below runs/. null takes the model's and the precision's names."""

    @field_validator("name")
    @classmethod
    def name_a_folder(cls, name: str | None) -> str | None:
        """Refuse a name that is more than the name of one folder."""
        if name is not None and not RUN_NAME.fullmatch(name):
            raise ValueError(
                "a run's name has 1 to 100 letters, digits, '.', '_', '-' and inner spaces, and starts with no dot"
            )
        return name


@dataclass(frozen=True)
class Choice:
    """A plugin chosen by name, and its settings."""

    name: str
    settings: Any
    """The plugin's `Settings`, as read from its source."""
    plugin: Plugin = field(repr=False, compare=False)

    def member(self, name: str) -> Any:
        """Import the plugin and return its function of that name. Raises PartError if one from outside has none."""
        return self.plugin.member(name)

    def native_settings(self) -> Any:
        """Return the settings in the imported module's own class, which pickles and passes isinstance."""
        return self.plugin.native_settings(self.settings)


@dataclass(frozen=True)
class Precision(Choice):
    """The precision mode chosen. `name` and `mode` are the same."""

    @property
    def mode(self) -> str:
        return self.name


@dataclass(frozen=True)
class Memory:
    """The memory tricks that are on, by name in the order they were written, and the answer when memory runs out."""

    on_oom: Literal["stop", "adapt"]
    tricks: dict[str, Any]
    """Name -> the trick's `Settings`. A trick that is off is absent."""
    plugins: dict[str, Plugin] = field(repr=False, compare=False)
    ceiling: str | None = "auto"


@dataclass(frozen=True)
class Config:
    """One run, entirely decided."""

    model: Choice
    task: Choice
    dataset: Choice
    precision: Precision
    memory: Memory
    optimizer: Choice
    train: Train
    seed: int
    name: str | None
    parallel: Parallel = field(default_factory=lambda: Parallel.model_validate({}))
    notes: tuple[str, ...] = field(default=(), compare=False)
    """Notes for the user on the reading of the file."""

    @property
    def run_name(self) -> str:
        """The run's name: the given one, or the model's and the precision's. Always the name of one folder."""
        return (
            self.name
            or re.sub(r"[^A-Za-z0-9._-]", "-", f"{self.model.name}-{self.precision.mode}")[:100]
        )

    @property
    def heading(self) -> str:
        """The run's name, with the model's unless it is part of it: an override may have changed the model alone."""
        model = self.model.name.rpartition(":")[2]
        return self.run_name if model in self.run_name else f"{self.run_name} ({self.model.name})"

    @property
    def granted(self) -> tuple[str, ...]:
        """The package that the model comes from, if loading this configuration was allowed to use one."""
        return (self.model.name.split(":")[0],) if ":" in self.model.name else ()

    @property
    def sized_dataset(self) -> Choice:
        """The data set with the image size and channels that its settings leave open taken from the model's."""
        settings = self.dataset.settings
        wanted = {
            key: setting_of(self.model.settings, key)
            for key in ("image_size", "channels")
            if key in type(settings).model_fields and setting_of(settings, key) is None
        }
        return replace(self.dataset, settings=settings.model_copy(update=wanted))

    def to_data(self) -> dict[str, Any]:
        """Return every setting as plain values, in the layout of the YAML file."""
        data: dict[str, Any] = {}
        for section in ("model", "task", "dataset"):
            choice = getattr(self, section)
            data[section] = {"name": choice.name, **dump(choice.settings)}
        data["precision"] = {"mode": self.precision.mode, **dump(self.precision.settings)}
        tricks = {name: dump(settings) or True for name, settings in self.memory.tricks.items()}
        data["memory"] = {"on_oom": self.memory.on_oom, "ceiling": self.memory.ceiling, **tricks}
        data["optimizer"] = {"name": self.optimizer.name, **dump(self.optimizer.settings)}
        data["train"] = dump(self.train)
        data["parallel"] = dump(self.parallel)
        data |= {"seed": self.seed, "name": self.name}
        return data

    def to_yaml(self) -> str:
        """Return a file with every setting, defaults included, that reads back to an equal `Config`."""
        return write_text(self.to_data())


def dump(settings: Options) -> dict[str, Any]:
    """Return settings as plain values that YAML can hold."""
    return settings.model_dump(mode="json", by_alias=True)
