"""What the command line may ask for: a class per command, the one place where its options are declared. No torch.

A field is an option named after it, with the text below it as help; one whose type is annotated with `typer.Argument`
is positional, and `typer.Option` says what name and type cannot. `mpt.commands.cli.command_line` makes the command of
it, and the command gets an instance. A part package declares its commands the same way (`class Command` in
`commands/NAME.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from mpt.commands.cli.completion import complete_config, complete_override, complete_planned, complete_run

ConfigFile = Annotated[
    Path,
    typer.Argument(
        metavar="CONFIG",
        help="A YAML file, @NAME of mpt list configs, or - for the standard input.",
        show_default=False,
        autocompletion=complete_config,
    ),
]
Overrides = Annotated[
    tuple[str, ...],
    typer.Argument(
        metavar="KEY=VALUE",
        help="Changes, such as optimizer.lr=3e-4.",
        show_default=False,
        autocompletion=complete_override,
    ),
]
Patches = Annotated[tuple[Path, ...], typer.Option("--with", metavar="FILE", help="A YAML file to lay over CONFIG.")]
Allow = Annotated[tuple[str, ...], typer.Option("--allow", metavar="PACKAGE", help="Let models come from a package.")]
Runs = Annotated[str, typer.Option("--runs", metavar="DIR", help="The folder of the runs.")]
Device = Annotated[str | None, typer.Option("--device", help="auto, cpu, cuda, cuda:1 or mps.")]
Best = Annotated[
    bool, typer.Option("--best", help="The run's best checkpoint by its metric; the default if it was evaluated.")
]
Newest = Annotated[bool, typer.Option("--newest", help="The run's newest checkpoint.")]
StepOfCheckpoint = Annotated[int | None, typer.Option("--step", min=0, help="The run's checkpoint of this step.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Print warnings and errors only.")]
Output = Annotated[str | None, typer.Option("--output", "-o", metavar="PATH", help="Where to write.")]
PlannedFile = Annotated[
    Path,
    typer.Argument(
        metavar="CONFIG",
        help="A YAML file, @NAME of mpt list configs, or - for the standard input.",
        show_default=False,
        autocompletion=complete_planned,
    ),
]
Card = Annotated[
    str | None, typer.Option("--gpu", metavar="NAME", help="A card to plan for, such as rtx2060, or auto.")
]
Desktop = Annotated[
    str | None,
    typer.Option(
        "--desktop",
        metavar="SIZE",
        help="What the desktop takes of the card, such as 600MiB; wddm: what Windows keeps, about a fifth.",
    ),
]
AllowLossy = Annotated[
    bool,
    typer.Option(
        "--allow-lossy",
        help="Propose what changes the learnt result too: bfloat16 weights without masters, 8-bit optimizer states.",
    ),
]
Strategy = Annotated[
    str | None,
    typer.Option("--strategy", metavar="NAME", help="How cards share the work: ddp or fsdp; else as in CONFIG."),
]
Network = Annotated[
    str | None,
    typer.Option(
        "--network",
        metavar="NAME",
        help="Between machines: ethernet-10, -25, -100, infiniband-hdr or -ndr; else what is usual for the card.",
    ),
]
PerMachine = Annotated[int, typer.Option("--per-machine", min=1, metavar="N", help="Cards in a machine.")]


@dataclass(frozen=True)
class TrainArguments:
    """Train what CONFIG describes."""

    config: ConfigFile
    overrides: Overrides = ()
    resume: Annotated[str | None, typer.Option(metavar="[auto|PATH]", autocompletion=complete_run)] = None
    """Go on with the newest run of this name, or with PATH."""
    name: str | None = None
    """The run's folder below --runs."""
    device: Device = None
    seed: int | None = None
    """The seed of every random number."""
    smoke: Annotated[int | None, typer.Option(min=1, metavar="N")] = None
    """Try everything with N steps; keep nothing."""
    dry_run: bool = False
    """Build everything, write nothing."""
    print_config: bool = False
    """Print the resolved config and stop."""
    json: Json = False
    quiet: Quiet = False
    exact: bool = False
    """Refuse a resume that would not be bit-exact."""
    nproc: Annotated[int | None, typer.Option(min=1, metavar="N")] = None
    """Train in N processes on this machine, a card for each (torchrun for more)."""
    max_restarts: Annotated[int, typer.Option(min=0, metavar="N")] = 0
    """With --nproc: begin again so often from the last checkpoint when a process is lost."""
    no_report: bool = False
    """Leave the report to `mpt report`."""
    patches: Patches = ()
    allow: Allow = ()
    runs: Runs = "runs"


@dataclass(frozen=True)
class InferArguments:
    """Let a run's networks infer: samples, labels or pictures."""

    run: Annotated[
        str | None, typer.Argument(metavar="RUN", show_default="the newest run", autocompletion=complete_run)
    ] = None
    """A run, a checkpoint, or an export of mpt convert (.onnx, .safetensors, .pt)."""
    half: bool = False
    """Run in half precision and say how far it is from fp32."""
    dtype: str | None = None
    """float16 or bfloat16; without --half the weights stay float32. Or float32."""
    input: Annotated[tuple[str, ...], typer.Option(metavar="[NAME=]PATH")] = ()
    """An image or a folder of images; once for each input of the task."""
    output: Annotated[str | None, typer.Option("--output", "-o", metavar="FOLDER|FILE.csv|FILE.png")] = None
    """A folder for all that is made, or one file: the table, or the samples. By default inference/ in the run."""
    overwrite: bool = False
    """Write over what is there."""
    top: Annotated[int, typer.Option(min=0)] = 1
    """How many labels per image, with probabilities; 0 tells the probabilities of all classes."""
    pictures: bool = False
    """Write the inputs with their labels below them too, labels.png."""
    skip_bad: bool = False
    """Leave out inputs that cannot be read, and list them. So too where the run has dataset.on_bad_image=skip."""
    count: Annotated[int | None, typer.Option(min=1)] = None
    """How many samples: of a generator or of the test set, 64 by default; or the first so many of --input."""
    single: bool = False
    """Write each sample of a generator as a file of its own, sample-0000.png and so on."""
    walk: Annotated[str | None, typer.Option(metavar="SEED:SEED[:...]")] = None
    """Write the way from one seed's sample to the next's too: walk.gif, walk.png."""
    frames: Annotated[int, typer.Option(min=2)] = 16
    """Pictures from seed to seed of a walk."""
    batch_size: Annotated[int | None, typer.Option(min=1)] = None
    """Samples at once."""
    vram: Annotated[str | None, typer.Option(metavar="SIZE")] = None
    """Memory that may be used, such as 4GiB: the batch, or the tiles of frames, are chosen to fit."""
    truncation: Annotated[float | None, typer.Option(min=0, max=1)] = None
    """How far truncated samples go from the mean; 1 is all the way."""
    seed: Annotated[int | None, typer.Option(min=0)] = None
    """The seed of the samples."""
    best: Best = False
    newest: Newest = False
    step: StepOfCheckpoint = None
    nproc: Annotated[int, typer.Option(min=1, metavar="N")] = 1
    """Share out the batches over N processes, a card for each; what is written is the same."""
    device: Device = None
    runs: Runs = "runs"
    allow: Allow = ()


@dataclass(frozen=True)
class EvaluateArguments:
    """Measure a run or an export on a whole test set.

    All metrics that there are for its task, on the run's own test set or on --data, with a page.
    """

    run: Annotated[
        str | None, typer.Argument(metavar="RUN", show_default="the newest run", autocompletion=complete_run)
    ] = None
    """A run, a checkpoint, or an export of mpt convert (.onnx, .safetensors, .pt)."""
    data: Annotated[str | None, typer.Option(metavar="FOLDER")] = None
    """Other data: a folder with a folder of images for each class, or laid out as the run's own data."""
    half: bool = False
    """Measure the weights in half too, and say how far its figures are from float32's."""
    dtype: str | None = None
    """With --half: float16 or bfloat16."""
    batch_size: Annotated[int | None, typer.Option(min=1)] = None
    """Samples at once."""
    output: Annotated[str | None, typer.Option("--output", "-o", metavar="FOLDER")] = None
    """The folder to write into; by default evaluations/ in the run, or beside an export."""
    best: Best = False
    newest: Newest = False
    step: StepOfCheckpoint = None
    device: Device = None
    json: Json = False
    runs: Runs = "runs"
    allow: Allow = ()


@dataclass(frozen=True)
class CompareArguments:
    """Train in several modes or settings, and judge.

    All are trained with the same seeds and data; the verdict says whether the metric stays within the margin of the
    first one's, which is fp32's where that takes part. Without a configuration and --seeds a small classifier is
    trained until its seeds decide.
    """

    what: Annotated[tuple[str, ...], typer.Argument(metavar="MODE|CONFIG|RUN|KEY=VALUE", show_default=False)] = ()
    """Precision modes, configurations, or finished runs."""
    config: Annotated[Path | None, typer.Option(metavar="FILE", show_default="a small classifier")] = None
    """What to train."""
    variant: Annotated[tuple[str, ...], typer.Option("--variant", metavar="KEY=VALUE")] = ()
    """Compare with the configuration changed so, several settings in quotes; may be given several times."""
    over: Annotated[str | None, typer.Option(metavar="KEY=VALUES")] = None
    """Train each at several values of a setting, optimizer.lr=0.5x,1x,2x, and say at which it trains."""
    seeds: Annotated[int | None, typer.Option(show_default="3")] = None
    """Runs per mode, three at least for a verdict; with --until-decided, before the first look."""
    until_decided: bool = False
    """Add seeds until every verdict is in; each look is stricter for it, so that the error rates hold."""
    max_seeds: int = 16
    """Where --until-decided ends."""
    jobs: Annotated[int | None, typer.Option(metavar="N", show_default="free cores or cards")] = None
    """Runs at a time; 1 for step times of every seed. On a CPU the first seed's runs are alone, for the step times."""
    margin: Annotated[str | None, typer.Option(show_default="1%; 10% with --over")] = None
    """The difference that matters: 1% or 0.5."""
    gate: bool = False
    """Exit with 8 unless every mode is within the margin."""
    name: str | None = None
    """The comparison's folder below --runs."""
    output: Output = None
    device: Device = None
    json: Json = False
    quiet: Quiet = False
    allow: Allow = ()
    runs: Runs = "runs"


@dataclass(frozen=True)
class PlannedConfig:
    """What every plan of a configuration is asked with."""

    config: ConfigFile
    overrides: Overrides = ()
    patches: Patches = ()
    allow: Allow = ()
    json: Json = False


@dataclass(frozen=True)
class PlanArguments(PlannedConfig):
    """Predict peak memory without a GPU; find what fits.

    Plans one training of CONFIG; with --vram, the fastest recipe that fits is searched and written. Sub-commands:
    infer, presets, tune, calibrate, lock, check, cluster; `mpt plan infer -h` explains one.
    """

    config: PlannedFile
    vram: Annotated[str | None, typer.Option(metavar="SIZE")] = None
    """The memory to fit into, such as 6GiB; without it the configuration is planned as it is."""
    gpu: Card = None
    output: Output = None
    times_from: Annotated[str | None, typer.Option(metavar="CARD")] = None
    """Take the step time's factor of another calibrated card, moved by both cards' rooflines."""
    desktop: Desktop = None
    allow_lossy: AllowLossy = False
    gate: bool = False
    """Exit with 10 where it only may fit, and with 7 where CONFIG does not fit a card without --vram."""
    largest: bool = False
    """Find the largest batch that fits too: of CONFIG, or of the first recipe."""
    nproc: Annotated[int | None, typer.Option(min=1, metavar="N")] = None
    """Plan for N processes with a card each; train.batch_size is the batch of all of them."""
    strategy: Strategy = None
    network: Network = None
    per_machine: PerMachine = 8
    snapshot: Annotated[str | None, typer.Option(metavar="FILE")] = None
    """Write the planned timeline of CONFIG as it stands as a memory snapshot of torch, for pytorch.org/memory_viz."""
    verbose: bool = False
    """Say what holds the memory, by kind and by module."""


@dataclass(frozen=True)
class PlanStepArguments:
    """Plan a training step of your own code, which need not know mpt, and what to write into it.

    FACTORY is a function, as FILE.py:NAME or PACKAGE.MODULE:NAME, that returns the step, or (model, optimizer, batch,
    step). `mpt plan FACTORY` does the same.
    """

    factory: Annotated[str, typer.Argument(metavar="FACTORY", show_default=False)]
    """Where the function is."""
    overrides: Annotated[tuple[str, ...], typer.Argument(metavar="[NAME=VALUE]...", show_default=False)] = ()
    """Arguments for it; with batch_size among them --largest can vary it."""
    vram: Annotated[str | None, typer.Option(metavar="SIZE")] = None
    """The memory to fit into, such as 6GiB."""
    gpu: Card = None
    desktop: Desktop = None
    largest: bool = False
    """Find the largest batch_size that fits."""
    snapshot: Annotated[str | None, typer.Option(metavar="FILE")] = None
    """Write the planned timeline as a memory snapshot of torch, for pytorch.org/memory_viz."""
    allow: Allow = ()
    json: Json = False


@dataclass(frozen=True)
class PlanInferArguments(PlannedConfig):
    """Plan inference: what it needs, and the largest batch or tile that fits."""

    vram: Annotated[str | None, typer.Option(metavar="SIZE")] = None
    """The memory to fit into, such as 4GiB."""
    gpu: Card = None
    desktop: Desktop = None
    half: bool = False
    """Weights in half, as mpt infer --half stores them."""
    dtype: str | None = None
    """float32, float16 or bfloat16, as for mpt infer."""
    frame: Annotated[str | None, typer.Option(metavar="WxH")] = None
    """The size of frames that are cut into tiles, such as 1920x1080; the tile is chosen to fit."""


@dataclass(frozen=True)
class PlanPresetsArguments(PlannedConfig):
    """Write a patch for each usual size of card, 6 to 24 GB, and print a table."""

    gpu: Annotated[str | None, typer.Option(metavar="NAME")] = None
    """The card whose kernels and times are planned, by default an RTX 2060."""
    output: Annotated[str | None, typer.Option("--output", "-o", metavar="FOLDER")] = None
    """The folder to write into, by default presets/."""
    allow_lossy: AllowLossy = False


@dataclass(frozen=True)
class PlanTuneArguments(PlannedConfig):
    """Measure here which kernels are fastest, and write what gains.

    Optimizer kernels and the order of channels are tried on this device.
    """

    output: Output = None


@dataclass(frozen=True)
class PlanCalibrateArguments:
    """Learn from a run's measured peak and time what plans of its card lack."""

    run: Annotated[str, typer.Argument(metavar="RUN", show_default=False, autocompletion=complete_run)]
    """A run that trained on the card."""
    allow: Allow = ()
    runs: Runs = "runs"


@dataclass(frozen=True)
class PlanLockArguments(PlannedConfig):
    """Keep the plan of CONFIG as it stands in a file for mpt plan check."""

    gpu: Card = None
    output: Annotated[str, typer.Option("--output", "-o", metavar="FILE")] = "plan.lock"
    """The file to write."""


@dataclass(frozen=True)
class PlanCheckArguments:
    """Exit with 8 where the plan that a lock keeps has grown since."""

    lock: Annotated[Path, typer.Argument(metavar="LOCK", show_default=False)]
    """A file of mpt plan lock."""
    config: Annotated[
        Path | None, typer.Argument(metavar="CONFIG", show_default="the lock's", autocompletion=complete_config)
    ] = None
    """A YAML file to plan in place of the lock's."""
    overrides: Overrides = ()
    patches: Patches = ()
    tolerance: Annotated[str, typer.Option(metavar="SHARE")] = "1%"
    """By how much the peak may rise and the step slow down."""
    gpu: Annotated[str | None, typer.Option(metavar="NAME")] = None
    """The lock's card; another one is refused."""
    allow: Allow = ()
    json: Json = False


@dataclass(frozen=True)
class PlanClusterArguments(PlannedConfig):
    """Plan many cards: from one to thousands, or the cheapest set that trains CONFIG."""

    scaling: Annotated[str | None, typer.Option(metavar="weak|strong")] = None
    """From 1 to --nproc cards, as table and picture: with the batch per card kept (weak), or of all."""
    cards: Annotated[tuple[str, ...], typer.Option("--cards", metavar="NAME:COUNT@PRICE")] = ()
    """Find the cheapest set of these cards that trains CONFIG, such as rtx3090:4@0.3; once for each kind of card."""
    nproc: Annotated[int | None, typer.Option(min=1, metavar="N", show_default="4096")] = None
    """With --scaling: the most cards."""
    strategy: Strategy = None
    network: Network = None
    per_machine: PerMachine = 8
    vram: Annotated[str | None, typer.Option(metavar="SIZE")] = None
    """With --scaling: the memory of a card that may be used."""
    gpu: Card = None
    desktop: Desktop = None
    allow_lossy: AllowLossy = False


@dataclass(frozen=True)
class DoctorArguments:
    """Examine the machine, the data, the numerics and the speed."""

    subject: Annotated[
        str | None, typer.Argument(metavar="[CONFIG|RUN]", show_default="this machine", autocompletion=complete_run)
    ] = None
    """A YAML file, a run or a checkpoint."""
    overrides: Overrides = ()
    only: Annotated[tuple[str, ...], typer.Option("--only", metavar="PART")] = ()
    """environment, data, numerics or speed; may be given several times. device checks a GPU for some minutes and writes
    device.json, or what -o says, which helps others when it is sent (docs/how-to/help.md)."""
    dtype: str | None = None
    """float16 or bfloat16: what a mode that may choose is examined in; on a CPU float16, as on most GPUs."""
    batch_size: Annotated[int | None, typer.Option(min=1)] = None
    """Samples of the step whose numerics are examined."""
    points: Annotated[int, typer.Option(min=1)] = 4
    """Of a run's training, the beginning and the newest checkpoint among them, whose numerics are examined."""
    output: Output = None
    page: Annotated[str | None, typer.Option(metavar="FILE")] = None
    """Write an HTML page too."""
    device: Device = None
    json: Json = False
    patches: Patches = ()
    allow: Allow = ()
    runs: Runs = "runs"


@dataclass(frozen=True)
class DiffArguments:
    """Find where two configurations or runs first part.

    Both are trained for a few steps side by side, from the same seed or from the newest checkpoint that two runs have
    in common to the bit. Exit code 0 where they are the same or differ by rounding, 8 where they part by more.
    """

    what: Annotated[tuple[str, ...], typer.Argument(metavar="A B [KEY=VALUE]", autocompletion=complete_run)]
    """Two of: a YAML file, a run, a checkpoint, a precision mode (then B is A in that mode)."""
    variant: Annotated[str | None, typer.Option(metavar="KEY=VALUE")] = None
    """In place of B: what is changed of A, several settings in quotes."""
    steps: Annotated[int, typer.Option(min=1)] = 10
    """Steps to take at most."""
    seed: int | None = None
    """The seed of both, where theirs should not count."""
    dtype: str | None = None
    """float16 or bfloat16: what a mode that may choose computes in; float16 on a CPU is computed as on a GPU."""
    only_files: bool = False
    """Compare what two runs left, and train nothing."""
    nproc: Annotated[int | None, typer.Option(min=2)] = None
    """In place of B: A on so many processes of this machine, each step from the same state."""
    device: Device = None
    json: Json = False
    allow: Allow = ()
    runs: Runs = "runs"


@dataclass(frozen=True)
class VerifyResumeArguments:
    """Check that CONFIG, resumed, ends bit for bit as in one go.

    Exit code 0 where it does, 8 where it does not.
    """

    config: Annotated[str, typer.Argument(metavar="CONFIG|RUN", show_default=False, autocompletion=complete_run)]
    """A YAML file, or a run whose configuration is taken."""
    overrides: Overrides = ()
    steps: Annotated[int, typer.Option(min=2)] = 20
    """Total number of steps; the run is stopped halfway."""
    kill: bool = False
    """Kill the process three times without warning, at moments that are not chosen, instead of stopping it."""
    output: Output = None
    device: Device = None
    json: Json = False
    allow: Allow = ()
    runs: Runs = "runs"


@dataclass(frozen=True)
class ReportArguments:
    """Write a run's tables, plots and page anew."""

    run: Annotated[
        str | None, typer.Argument(metavar="RUN", show_default="the newest one", autocompletion=complete_run)
    ] = None
    """A run."""
    all: bool = False
    """Write one page over all runs instead: index.html in their folder."""
    figures: Annotated[str | None, typer.Option(metavar="DIR")] = None
    """Write the curves into a folder too: CSV, and each plot as SVG and PDF."""
    runs: Runs = "runs"


@dataclass(frozen=True)
class ConvertArguments:
    """Write a run's networks as one file."""

    run: Annotated[
        str | None, typer.Argument(metavar="RUN", show_default="the newest one", autocompletion=complete_run)
    ] = None
    """A run or a checkpoint."""
    half: bool = False
    """Write half precision."""
    to: str | None = None
    """pt, safetensors or onnx; without it as --output ends, else safetensors."""
    inside: bool = False
    """ONNX: with normalisation and softmax inside, from images in [0, 1] to probabilities."""
    dtype: str | None = None
    """float16 or bfloat16, with --half."""
    best: Best = False
    newest: Newest = False
    step: StepOfCheckpoint = None
    output: Output = None
    overwrite: bool = False
    """Write over what is there."""
    runs: Runs = "runs"
    allow: Allow = ()


@dataclass(frozen=True)
class ValidateArguments:
    """Check CONFIG and say every mistake at once.

    What is written is checked first; then the run is built and stepped on fake tensors, so that what passes trains.
    """

    config: ConfigFile
    overrides: Overrides = ()
    patches: Patches = ()
    allow: Allow = ()
    quick: bool = False
    """Check only what is written, in a fraction of a second; a size that the network refuses is not found."""
    quiet: Quiet = False


@dataclass(frozen=True)
class SchemaArguments:
    """Print the JSON Schema of CONFIG, or with --plan of a plan."""

    output: Output = None
    plan: bool = False
    """The schema of what `mpt plan CONFIG --json` prints."""


@dataclass(frozen=True)
class ListArguments:
    """List models, modes, runs and all the rest."""

    what: Annotated[str | None, typer.Argument(metavar="WHAT", show_default=False)] = None
    """models, datasets, precision, memory, optimizers, tasks, metrics, losses, configs or runs."""
    json: Json = False
    runs: Runs = "runs"


@dataclass(frozen=True)
class InitArguments:
    """Write a CONFIG or a part to start from.

    CONFIG is written with every setting and what it does. With --part it is the skeleton of a part: a file that works,
    its configuration and its test.
    """

    path: Annotated[Path | None, typer.Argument(metavar="PATH|NAME", show_default=False)] = None
    """The file to write, by default config.yaml; with --part the part's name."""
    model: str = "dcgan"
    """The model to start from; see `mpt list models`."""
    source: Annotated[str | None, typer.Option("--from", metavar="NAME")] = None
    """Copy a configuration that comes with mpt instead; see `mpt list configs`."""
    part: Annotated[str | None, typer.Option(metavar="KIND")] = None
    """model, task, dataset, loss, metric, optimizer, precision, trick or command."""
    into: Annotated[str | None, typer.Option(metavar="DIR")] = None
    """With --part: the folder of parts, by default the one of --parts, else `parts`."""


@dataclass(frozen=True)
class ImportArguments:
    """Translate another program's configuration or command line.

    Of Hugging Face's TrainingArguments, LightningCLI, Ultralytics, timm, OneTrainer, kohya's scripts and DeepFaceLab.
    Values come with their units (8 x 4 = 32), and what has no counterpart is listed as comments.
    """

    source: Annotated[Path | None, typer.Argument(metavar="FILE", show_default=False)] = None
    """YAML, JSON, TOML, a DeepFaceLab model's data.dat or summary.txt, or a text file with a command line."""
    command: Annotated[str | None, typer.Option(metavar="'COMMAND LINE'")] = None
    """A command line in quotes, in place of a file."""
    model: Annotated[str | None, typer.Option(metavar="NAME")] = None
    """The model to write, if the file names none that mpt has."""
    output: Output = None
    allow: Allow = ()
