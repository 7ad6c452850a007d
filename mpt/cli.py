"""Arguments and exit codes of the command `mpt`, and nothing else.

Each command's work is in `mpt.commands`, imported when the command is called, so that `mpt --help` needs no torch. This
is the one place where an `MptError` becomes a message on stderr and an exit code. The codes are in `mpt.errors`; beside
them 0 is success, 2 also a wrong command line, and 130 an interrupt before there was anything to save.
"""

from __future__ import annotations

import importlib
import io
import itertools
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import typer

from mpt import __version__
from mpt.commands.arguments import (
    CompareArguments,
    ConvertArguments,
    InferArguments,
    LerasArguments,
    PlanArguments,
    ReportArguments,
    TrainArguments,
)
from mpt.errors import ConfigError, InputOutputError, Interrupted, MptError
from mpt.run.files import FULL

app = typer.Typer(
    name="mpt",
    help="Mixed-precision training that fits the card you have.",
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

LERAS_DIRECTIONS: dict[str, Literal["leras-to-torch", "torch-to-leras"]] = {
    "leras-to-torch": "leras-to-torch",
    "torch-to-leras": "torch-to-leras",
}

ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="A YAML file.", show_default=False)]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Changes, such as optimizer.lr=3e-4.")]
Patches = Annotated[list[Path] | None, typer.Option("--with", metavar="FILE", help="A YAML file to lay over CONFIG.")]
Allow = Annotated[list[str] | None, typer.Option("--allow", metavar="PACKAGE", help="Let models come from a package.")]
Runs = Annotated[str, typer.Option("--runs", metavar="DIR", help="The folder of the runs.")]
Device = Annotated[str | None, typer.Option("--device", help="auto, cpu, cuda, cuda:1 or mps.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Print warnings and errors only.")]
Output = Annotated[str | None, typer.Option("--output", "-o", metavar="PATH", help="Where to write.")]


def print_version(wanted: bool) -> None:
    """Print the version and stop, where that is wanted."""
    if wanted:
        print(f"mpt {__version__}")
        raise typer.Exit


@app.callback(
    epilog="Exit codes: 0 done, 2 configuration or command line, 3 data, 4 checkpoint refused, 5 input or output, "
    "6 not finite, 7 out of memory or does not fit, 8 the gate of compare, 130 and 143 interrupted after saving."
)
def common(
    version: Annotated[
        bool, typer.Option("--version", callback=print_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """Mixed-precision training that fits the card you have."""


@app.command()
def train(
    config: ConfigFile,
    overrides: Overrides = None,
    resume: Annotated[
        str | None, typer.Option(metavar="[auto|PATH]", help="Go on with the newest run of this name, or with PATH.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="The run's folder below --runs.")] = None,
    device: Device = None,
    seed: Annotated[int | None, typer.Option(help="The seed of every random number.")] = None,
    smoke: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Try everything with N steps; keep nothing.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Build everything, write nothing.")] = False,
    print_config: Annotated[bool, typer.Option("--print-config", help="Print the resolved config and stop.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
    exact: Annotated[bool, typer.Option("--exact", help="Refuse a resume that would not be bit-exact.")] = False,
    patches: Patches = None,
    allow: Allow = None,
    runs: Runs = "runs",
) -> None:
    """Train what CONFIG describes."""
    arguments = TrainArguments(
        config=config,
        overrides=tuple(overrides or ()),
        resume=resume,
        name=name,
        device=device,
        seed=seed,
        smoke=smoke,
        dry_run=dry_run,
        print_config=print_config,
        json=as_json,
        quiet=quiet,
        exact=exact,
        patches=tuple(patches or ()),
        allow=tuple(allow or ()),
        runs=runs,
    )
    call("train", arguments)


@app.command()
def infer(
    run: Annotated[
        str | None, typer.Argument(metavar="RUN", help="A run or a checkpoint.", show_default="the newest run")
    ] = None,
    half: Annotated[
        bool, typer.Option("--half", help="Run in half precision and say how far it is from fp32.")
    ] = False,
    dtype: Annotated[
        str | None, typer.Option(help="float16 or bfloat16; without --half the weights stay float32. Or float32.")
    ] = None,
    input: Annotated[
        list[str] | None,
        typer.Option(metavar="[NAME=]PATH", help="An image or a folder of images; once for each input of the task."),
    ] = None,
    output: Output = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Samples at once.")] = None,
    truncation: Annotated[
        float | None, typer.Option(min=0, max=1, help="How far truncated samples go from the mean; 1 is all the way.")
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="The seed of the samples.")] = None,
    device: Device = None,
    runs: Runs = "runs",
    allow: Allow = None,
) -> None:
    """Let a run's networks infer: samples, labels or pictures."""
    arguments = InferArguments(
        run=run,
        half=half,
        dtype=dtype,
        input=tuple(input or ()),
        output=output,
        batch_size=batch_size,
        truncation=truncation,
        seed=seed,
        device=device,
        runs=runs,
        allow=tuple(allow or ()),
    )
    call("infer", arguments)


@app.command()
def compare(
    what: Annotated[list[str], typer.Argument(metavar="MODE|RUN|KEY=VALUE", help="Precision modes, or finished runs.")],
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="What to train.", show_default="a small DCGAN")
    ] = None,
    seeds: Annotated[int, typer.Option(help="Runs per mode, three at least for a verdict.")] = 3,
    margin: Annotated[str, typer.Option(help="The difference that matters: 1% or 0.5.")] = "1%",
    gate: Annotated[bool, typer.Option("--gate", help="Exit with 8 unless every mode is within the margin.")] = False,
    name: Annotated[str | None, typer.Option(help="The comparison's folder below --runs.")] = None,
    output: Output = None,
    device: Device = None,
    as_json: Json = False,
    quiet: Quiet = False,
    allow: Allow = None,
    runs: Runs = "runs",
) -> None:
    """Train in several precision modes, or take runs, and judge.

    Each mode trains the same CONFIG with the same seeds and data; the verdict says whether the metric stays within the
    margin of the first mode's, which is fp32's where that takes part.
    """
    arguments = CompareArguments(
        what=tuple(what),
        config=config,
        seeds=seeds,
        margin=margin,
        gate=gate,
        name=name,
        output=output,
        device=device,
        json=as_json,
        quiet=quiet,
        allow=tuple(allow or ()),
        runs=runs,
    )
    call("compare", arguments)


@app.command()
def plan(
    config: Annotated[Path | None, typer.Argument(metavar="CONFIG", help="A YAML file.", show_default=False)] = None,
    overrides: Overrides = None,
    vram: Annotated[str | None, typer.Option(metavar="SIZE", help="The memory to fit into, such as 6GiB.")] = None,
    gpu: Annotated[
        str | None, typer.Option(metavar="NAME", help="A card to plan for, such as rtx2060, or auto.")
    ] = None,
    desktop: Annotated[
        str | None, typer.Option(metavar="SIZE", help="What the desktop takes of the card, such as 600MiB.")
    ] = None,
    patches: Patches = None,
    output: Output = None,
    calibrate: Annotated[str | None, typer.Option(metavar="RUN", help="Learn from a run's measured peak.")] = None,
    as_json: Json = False,
    allow: Allow = None,
    runs: Runs = "runs",
) -> None:
    """Predict peak memory without a GPU; find what fits."""
    if config is None and calibrate is None:
        raise ConfigError("mpt plan: CONFIG is missing; name a YAML file, or --calibrate RUN")
    arguments = PlanArguments(
        config=config,
        overrides=tuple(overrides or ()),
        vram=vram,
        gpu=gpu,
        desktop=desktop,
        patches=tuple(patches or ()),
        output=output,
        calibrate=calibrate,
        json=as_json,
        allow=tuple(allow or ()),
        runs=runs,
    )
    call("plan", arguments)


@app.command()
def report(
    run: Annotated[str | None, typer.Argument(metavar="RUN", help="A run.", show_default="the newest one")] = None,
    runs: Runs = "runs",
) -> None:
    """Write a run's tables, plots and page anew."""
    call("report", ReportArguments(run=run, runs=runs))


@app.command()
def convert(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN|DIRECTION FROM OUT",
            help="A run; or leras-to-torch MODEL_DIR OUT; or torch-to-leras RUN OUT.",
        ),
    ],
    half: Annotated[bool, typer.Option("--half", help="Write half precision.")] = False,
    to: Annotated[str, typer.Option(help="pt, safetensors or onnx.")] = "safetensors",
    dtype: Annotated[str | None, typer.Option(help="float16 or bfloat16, with --half.")] = None,
    output: Output = None,
    archi: Annotated[str | None, typer.Option(help="leras-to-torch: DeepFaceLab's archi, such as df-ud.")] = None,
    config: Annotated[Path | None, typer.Option(help="leras-to-torch: the configuration of the new run.")] = None,
    runs: Runs = "runs",
    allow: Allow = None,
) -> None:
    """Write a run's networks as one file; to and from leras.

    leras is what DeepFaceLab's models are made of.
    """
    granted = tuple(allow or ())
    direction, *paths = words
    if direction in LERAS_DIRECTIONS:
        if len(paths) != 2:
            raise ConfigError(f"mpt convert {direction}: found {len(paths)} paths; two are needed: from and to")
        call(
            "mpt.systems.deepfacelab.commands.convert_leras",
            LerasArguments(LERAS_DIRECTIONS[direction], paths[0], paths[1], runs, granted, archi, config),
        )
        return
    if paths:
        raise ConfigError(
            f"mpt convert: found {len(words)} words; give one RUN, or leras-to-torch or torch-to-leras first"
        )
    call(
        "convert",
        ConvertArguments(run=direction, half=half, to=to, dtype=dtype, output=output, runs=runs, allow=granted),
    )


@app.command()
def validate(
    config: ConfigFile,
    overrides: Overrides = None,
    patches: Patches = None,
    allow: Allow = None,
    quiet: Quiet = False,
) -> None:
    """Check CONFIG and say every mistake at once."""
    call("validate", config, overrides or (), patches or (), allow or (), quiet)


@app.command()
def schema(output: Output = None) -> None:
    """Print the JSON Schema of CONFIG, for editors."""
    call("schema", output)


@app.command("list")
def list_plugins(
    room: Annotated[
        str | None, typer.Argument(metavar="WHAT", help="models, datasets, precision, memory, optimizers or tasks.")
    ] = None,
    as_json: Json = False,
) -> None:
    """List models, data sets, precision modes and all the rest."""
    call("listing", room, as_json)


@app.command()
def init(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="The file to write.")] = Path("config.yaml"),
    model: Annotated[str, typer.Option(help="The model to start from; see `mpt list models`.")] = "dcgan",
) -> None:
    """Write a commented CONFIG to start from."""
    call("init", path, model)


def call(command: str, *arguments: Any) -> None:
    """Import a command and run it. An interrupt that the command did not turn into a saved run ends with 130."""
    try:
        importlib.import_module(command if "." in command else f"mpt.commands.{command}").run(*arguments)
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def spell_resume(words: Sequence[str]) -> list[str]:
    """Write a `--resume` without a value as `--resume=auto`.

    What follows it is its value unless it is another option, an override or a configuration.
    """
    spelt: list[str] = []
    for word, following in itertools.pairwise([*words, "--"]):
        bare = following.startswith("-") or "=" in following or following.endswith((".yaml", ".yml"))
        spelt.append("--resume=auto" if word == "--resume" and bare else word)
    return spelt


def main(words: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a file's name need not be text in the terminal's encoding
            stream.reconfigure(errors="backslashreplace")
    try:
        app(args=spell_resume(sys.argv[1:] if words is None else words), prog_name="mpt")
    except MptError as error:
        fail(error)
    except BrokenPipeError:  # the reader of our output left, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:
        if error.filename is None and error.errno not in FULL:
            raise
        fail(InputOutputError(f"{error.filename or 'what was to be written'}: {error.strerror}"))
    sys.exit(0)


def fail(error: MptError) -> NoReturn:
    """Print the message and exit with the error's code. Being stopped and having saved is no error."""
    print(error if isinstance(error, Interrupted) else f"error: {error}", file=sys.stderr)
    sys.exit(error.exit_code)
