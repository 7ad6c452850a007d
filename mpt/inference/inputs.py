"""The inputs of `mpt infer`: image files, test samples, or nothing but a wish for samples.

A task names the fields that files may fill (`Task.inputs`); each file is brought to its field's channels, height and
width, by the run's data set if its file declares `sample_of_files(settings, data, files)`. A task of one field takes
any number of files. A task of several (two cameras, two frames) takes a file or a folder for each, `--input rgb=A
--input ir=B` or in the task's order; folders are matched by file name, without the suffix.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import field as initial
from pathlib import Path

import torch
from torch import Tensor

from mpt.data.loading.loader import to_device
from mpt.data.pictures.decoding import EXTENSIONS, MODES, BadImageError, Fit, decode_bytes
from mpt.engine.state.evaluation import infer
from mpt.errors import ConfigError, DataError
from mpt.inference.trained import Trained
from mpt.seams import Batch, Inference, Samples, Task

SAMPLES = 64
MAX_PIXELS = 100_000_000

Inputs = tuple[Batch | None, int]
"""A batch on the run's device, or None for samples; and the number of samples."""
Sample = dict[str, Path]
"""The file of each input field of one sample."""


@dataclass(frozen=True)
class Given:
    """One `--input`: the files of a folder, or one, and the field they are for if it was given."""

    text: str
    files: tuple[Path, ...]
    root: Path
    """The folder that the files' names are relative to."""
    field: str | None = None


def infer_one(trained: Trained, inputs: Inputs) -> Inference:
    """Return the task's inference for one batch of inputs, with the same random numbers each time."""
    batch, count = inputs
    return infer(trained.run, batch, count)


@dataclass
class Decoded:
    """Files that were decoded once and will be asked for again, as bytes, as far as they fit."""

    samples: dict[tuple[Path, ...], Batch] = initial(default_factory=dict)
    room_bytes: int = 1 << 29

    def keep(self, files: tuple[Path, ...], sample: Batch) -> None:
        """Remember the sample of some files if there is room."""
        size = sum(value.nbytes for value in sample.values())
        if size <= self.room_bytes:
            self.room_bytes -= size
            self.samples[files] = sample


def read_inputs(
    trained: Trained,
    samples: Sequence[Sample],
    batch_size: int,
    count: int = SAMPLES,
    decoded: Decoded | None = None,
    *,
    first: int = 0,
    every: int = 1,
) -> Iterator[Inputs]:
    """Yield batches of the files; without files, of test samples for a task that needs inputs, else a wish for
    samples, `count` of them. Of these each `every`-th, from number `first` on."""
    run = trained.run
    begin, step = first * batch_size, every * batch_size
    if not samples and needs_inputs(run.task):
        data = trained.test_data
        for start in range(begin, min(len(data), count), step):
            indices = list(range(start, min(start + batch_size, len(data), count)))
            yield to_device(data.fetch(indices, 0), run.device, run.data), len(indices)
        return
    if not samples:
        if first == 0:
            yield None, count
        return
    for start in range(begin, len(samples), step):
        chosen = samples[start : start + batch_size]
        read = [read_sample(trained, sample, decoded) for sample in chosen]
        batch = {field: torch.stack([one[field] for one in read]) for field in read[0]}
        yield to_device(batch, run.device, run.data), len(chosen)


def readable(
    trained: Trained, samples: list[Sample], skip: bool
) -> tuple[list[Sample], dict[str, str]]:
    """Return the samples, without those whose files are bad if that is wanted, and the omissions and why."""
    bad: dict[str, str] = {}
    if samples and (
        skip or trained.config.dataset.settings.model_dump().get("on_bad_image") == "skip"
    ):
        samples = list(without_bad(trained, samples, bad))
        if not samples:
            name, reason = next(iter(bad.items()))
            raise DataError(
                f"--input: none of {len(bad)} files can be read; the first: {name}: {reason}"
            )
    return samples, bad


def names_of(trained: Trained, samples: Sequence[Sample], made: int) -> list[str]:
    """Return the samples' names for the table: their first file, or the test set's name of them."""
    if samples:
        return [str(next(iter(sample.values()))) for sample in samples]
    if not needs_inputs(trained.run.task):
        return [f"sample {index}" for index in range(made)]
    return [
        trained.test_data.name_of(index).replace("sample", "test sample", 1)
        for index in range(made)
    ]


def without_bad(
    trained: Trained, samples: Sequence[Sample], bad: dict[str, str]
) -> Iterator[Sample]:
    """Yield the samples whose files can be read, and note the others with the reason. Each file is read twice."""
    for sample in samples:
        try:
            read_sample(trained, sample)
        except DataError as error:
            cause = error.__cause__
            name = cause.path if isinstance(cause, BadImageError) else next(iter(sample.values()))
            bad[str(name)] = cause.reason if isinstance(cause, BadImageError) else str(error)
            continue
        yield sample


def read_sample(trained: Trained, sample: Sample, decoded: Decoded | None = None) -> Batch:
    """Return the fields of one sample's files, pictures as float32 (c, h, w) in [0, 1]. Raises DataError."""
    files = tuple(sample.values())
    stored = decoded.samples.get(files) if decoded else None
    if stored is None:
        dataset, data = trained.config.dataset, trained.run.data
        by_data_set = dataset.plugin.optional("sample_of_files")
        if by_data_set is not None:
            own = {field: sample[field] for field in trained.run.task.inputs}
            stored = by_data_set(dataset.native_settings(), data, own)
        else:
            stored = {
                field: read_image(trained, field, sample[field])
                for field in trained.run.task.inputs
            }
        if decoded is not None:
            decoded.keep(files, stored)
    return {
        name: value.float().div_(255) if value.dtype == torch.uint8 else value
        for name, value in stored.items()
    }


LEFT_OUT = "Leave this file out, or add --skip-bad"
"""What can be done with an input that cannot be read."""


def read_image(trained: Trained, field: str, file: Path) -> Tensor:
    """Return one file as uint8 (c, h, w), as the field's layout asks. Raises DataError."""
    channels, height, width = trained.run.data.fields[field].shape
    if channels not in MODES:
        raise DataError(
            f"--input: '{field}' has {channels} channels; files can be read with 1, 3 or 4"
        )
    try:
        fit, share = fit_of(trained)
        return decode_bytes(file, channels, (height, width), MAX_PIXELS, fit, share=share)
    except BadImageError as error:
        raise DataError(f"--input: {error.path}: {error.reason}. {LEFT_OUT}") from error


def fit_of(trained: Trained) -> tuple[Fit, float]:
    """Return how the run's data set brings test pictures to size, and the share of a cut one that it looks at."""
    settings = trained.config.dataset.settings.model_dump()
    return settings.get("fit", "crop"), settings.get("test_share", 1.0)


def needs_inputs(task: Task) -> bool:
    """Does the task infer from inputs only, so that test samples are in if none are given?"""
    return bool(task.inputs) and not (isinstance(task, Samples) and task.optional_inputs)


def sampler_of(task: Task) -> Samples:
    """Return a task that makes samples. Raises ConfigError for one that makes none."""
    if isinstance(task, Samples):
        return task
    raise ConfigError(
        "this task makes no samples from noise: leave out --count, --single and --walk"
    )


def find_files(wanted: Sequence[str]) -> list[Given]:
    """Return the paths of each `--input`, before any run is opened. Raises DataError if there is nothing."""
    found = []
    for text in wanted:
        field, path = named(text)
        found.append(
            Given(
                text, tuple(input_files(str(path))), path if path.is_dir() else path.parent, field
            )
        )
    return found


def named(text: str) -> tuple[str | None, Path]:
    """Return an `--input` as its name, None if it has none, and its path."""
    field, _, rest = text.partition("=")
    is_named = bool(rest) and field.isidentifier() and not Path(text).exists()
    return (field, Path(rest)) if is_named else (None, Path(text))


def match_files(task: Task, model: str, given: Sequence[Given]) -> list[Sample]:
    """Return the samples that the files make for this task.

    Raises ConfigError if the inputs are not those of the task, DataError if files have no partner.
    """
    fields = tuple(task.inputs)
    if given and not fields:
        raise ConfigError(f"--input: {model} makes images from noise and takes none; leave it out")
    unknown = [one.field for one in given if one.field is not None and one.field not in fields]
    if unknown:
        raise ConfigError(
            f"--input: {model} has no input {unknown[0]!r}; it has {', '.join(fields)}"
        )
    if len(fields) == 1:
        return [{fields[0]: file} for one in given for file in one.files]
    if not given:
        return []
    by_field = {one.field or field: one for one, field in zip(given, fields)}
    if len(given) != len(fields) or set(by_field) != set(fields):
        example = " ".join(f"--input {field}=PATH" for field in fields)
        raise ConfigError(f"--input: {model} takes {len(fields)} inputs; write {example}")
    return pair_files({field: by_field[field] for field in fields})


def pair_files(by_field: Mapping[str, Given]) -> list[Sample]:
    """Return samples of files of several fields: one file of each, or those of one name. DataError for one alone."""
    if all(len(one.files) == 1 for one in by_field.values()):
        return [{field: one.files[0] for field, one in by_field.items()}]
    names = {
        field: {stem(file, one.root): file for file in one.files} for field, one in by_field.items()
    }
    first, *others = by_field
    for field in others:
        alone = sorted(set(names[first]) ^ set(names[field]))
        if alone:
            raise DataError(
                f"--input: {alone[0]!r} is not in both {by_field[first].text} and {by_field[field].text}; files that "
                "belong together have the same name in each folder"
            )
    return [{field: names[field][name] for field in by_field} for name in names[first]]


def stem(file: Path, root: Path) -> str:
    """Return a file's name below its folder, without the suffix."""
    return file.relative_to(root).with_suffix("").as_posix()


def input_files(wanted: str) -> list[Path]:
    """Return the image file, or the image files below the folder, sorted. Raises DataError when there is none."""
    path = Path(wanted)
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise DataError(f"--input: there is no file or folder {path}")
    files = sorted(file for file in path.rglob("*") if file.suffix.lower() in EXTENSIONS)
    if not files:
        raise DataError(f"--input: no images in {path}; looked for {', '.join(EXTENSIONS)}")
    return files
