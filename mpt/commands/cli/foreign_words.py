"""Other programs' options whose value has another unit here: the override that means the same, with the arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from mpt.config.load import load_config
from mpt.errors import MptError

BATCH_WORDS = ("per_device_train_batch_size", "batch_size", "batch", "train_batch_size", "bs", "b")
"""Names of the batch of one pass on the same command line."""


def explain_unit(name: str, value: str, given: Mapping[str, str], config: str | None) -> str | None:
    """Return the override for an option in another unit, and how it comes about; None if the value is taken as it is.

    `given` are the command line's other options, `config` the configuration that it names.
    """
    explain = UNITS.get(name)
    return explain(value, given, config) if explain is not None else None


def explain_accumulation(value: str, given: Mapping[str, str], config: str | None) -> str:
    """Translate passes per step: train.batch_size is all of them together, and memory.micro_batch is one."""
    batch = next((given[word] for word in BATCH_WORDS if given.get(word, "").isdigit()), None)
    batch = batch or batch_of(config)
    if batch is None or not value.isdigit():
        return (
            f"train.batch_size=BATCH memory.micro_batch=PART (train.batch_size is the batch that is optimised: {value} "
            "times that of one pass)"
        )
    whole = int(batch) * int(value)
    return f"train.batch_size={whole} memory.micro_batch={batch} ({batch} x {value} = {whole})"


def batch_of(config: str | None) -> str | None:
    """Return the batch of a configuration that the command line names; None if it cannot be read."""
    if config is None:
        return None
    try:
        return str(load_config(Path(config)).train.batch_size)
    except (MptError, OSError):
        return None


def explain_share(value: str, given: Mapping[str, str], config: str | None) -> str | None:
    """Translate a batch below 1, which is a share of the card's memory there, and -1, which asks for six tenths."""
    number = number_of(value)
    if number is None or not (0 < number < 1 or number == -1):
        return None
    share = 0.6 if number == -1 else number
    return (
        f"{value} is a share of the card's memory there ({share:.0%}); `mpt plan {config or 'CONFIG'} --gpu auto "
        "--largest` finds the largest batch that fits: train.batch_size=NUMBER"
    )


def explain_epochs(setting: str) -> Callable[[str, Mapping[str, str], str | None], str | None]:
    """Return a function that translates a number of epochs between two of something."""

    def explain(value: str, given: Mapping[str, str], config: str | None) -> str | None:
        number = number_of(value)
        if number is None or number <= 0:
            return None
        return f"{setting}='{number:g} epoch{'' if number == 1 else 's'}'"

    return explain


def explain_interval(value: str, given: Mapping[str, str], config: str | None) -> str | None:
    """Translate Lightning's interval: a share of an epoch, or a whole number of batches."""
    number = number_of(value)
    if number is None or "." not in value:
        return None
    return f"train.evaluate_every='{number:g} epochs'"


def explain_warmup(value: str, given: Mapping[str, str], config: str | None) -> str:
    """Translate a warm-up in epochs or as a share, which is in steps here."""
    return f"optimizer.warmup_steps=STEPS ({value} epochs x the steps of an epoch: samples / train.batch_size)"


def explain_ratio(value: str, given: Mapping[str, str], config: str | None) -> str:
    """Translate a warm-up as a share of the run."""
    number, steps = number_of(value), given.get("max_steps", "")
    if number is None or not steps.isdigit():
        return f"optimizer.warmup_steps=STEPS ({value} x the run's steps)"
    count = round(number * int(steps))
    return f"optimizer.warmup_steps={count} ({value} x {steps} = {count})"


def number_of(value: str) -> float | None:
    """Return a number, None for other text."""
    try:
        return float(value)
    except ValueError:
        return None


UNITS: dict[str, Callable[[str, Mapping[str, str], str | None], str | None]] = {
    **dict.fromkeys(
        ("gradient_accumulation_steps", "accumulate_grad_batches", "grad_accum_steps", "accumulate"),
        explain_accumulation,
    ),
    **dict.fromkeys(("batch", "batch_size"), explain_share),
    **dict.fromkeys(("save_period", "save_every_n_epochs"), explain_epochs("train.checkpoint_every")),
    "check_val_every_n_epoch": explain_epochs("train.evaluate_every"),
    "sample_every_n_epochs": explain_epochs("train.sample_every"),
    "val_check_interval": explain_interval,
    "warmup_epochs": explain_warmup,
    "warmup_ratio": explain_ratio,
}
