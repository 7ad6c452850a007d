"""Other programs' commands and options as people type them: ours that mean the same.

If a value has another unit here, the override comes with the arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from mpt.config.load import load_config
from mpt.config.text.messages import FOREIGN
from mpt.errors import MptError
from mpt.importers.shared.translation import epochs

SPELT = {
    **FOREIGN,
    "wd": "optimizer.weight_decay",
    "weight_decay": "optimizer.weight_decay",
    "image_size": "model.image_size",
    "data": "dataset",
    "workers": "dataset.workers",
    "pretrained": "model.weights",
    "weights": "model.weights",
    "fp16": "precision=amp",
    "amp": "precision=amp",
    "bf16": "precision=bf16",
    "model_ema": "train.ema=0.9999",
    "ema": "train.ema=0.9999",
    "wandb": "train.boards=[wandb]",
    "report_to": "train.boards=[wandb]",
    "tensorboard": "train.tensorboard=true",
    "gradient_checkpointing": "memory.recompute=true",
    "compile": "memory.compile=true",
    "torch_compile": "memory.compile=true",
    "channels_last": "memory.channels_last=true",
    "amp_dtype": "precision.dtype",
    "accumulate": "memory.micro_batch",
    "grad_accum_steps": "memory.micro_batch",
    "save_period": "train.checkpoint_every",
    "save_every_n_epochs": "train.checkpoint_every",
    "check_val_every_n_epoch": "train.evaluate_every",
    "sample_every_n_epochs": "train.sample_every",
    "warmup_epochs": "optimizer.warmup_steps",
    "warmup_ratio": "optimizer.warmup_steps",
}
"""Other programs' options -> the setting they mean."""
OPTIONS = {
    **dict.fromkeys(
        ("output_dir", "out_dir", "save_dir", "project", "default_root_dir"), "--runs DIR"
    ),
    **dict.fromkeys(("gpu", "gpu_id", "cuda", "accelerator"), "--device cuda:{value}"),
    **dict.fromkeys(
        ("devices", "gpus", "num_gpus", "nproc_per_node", "num_processes"), "--nproc {value}"
    ),
    **dict.fromkeys(("source", "images", "img_path"), "--input {value}"),
    "format": "--to {value}",
    "onnx": "--to onnx",
    "split": "--data FOLDER",
    **dict.fromkeys(("pdf", "svg", "csv"), "--figures DIR"),
    **dict.fromkeys(("memory", "max_memory", "budget", "vram_gb"), "--vram {value}"),
    **dict.fromkeys(
        ("ckpt", "ckpt_path", "checkpoint", "resume_from_checkpoint"), "--resume {value}"
    ),
}
"""Other programs' options -> the option that does it here, if the command has it."""
OTHER_COMMANDS = {
    "format": "mpt convert RUN --to {value}",
    "onnx": "mpt convert RUN --to onnx",
    "metrics": "mpt evaluate RUN, with all metrics",
}
"""Other programs' options -> the command that does it here."""
OF_RUN = ("ckpt", "ckpt_path", "checkpoint", "weights", "model", "model_path", "run", "resume")
"""Other programs' options for what is the first word here."""
COMMANDS = {
    **dict.fromkeys(("fit", "finetune", "run", "start"), "mpt train"),
    **dict.fromkeys(("resume", "continue", "restart"), "mpt train --resume RUN"),
    **dict.fromkeys(("predict", "generate", "sample", "inference"), "mpt infer"),
    **dict.fromkeys(("val", "validation", "test", "eval", "score"), "mpt evaluate"),
    **dict.fromkeys(("new", "create", "config"), "mpt init"),
    **dict.fromkeys(("estimate", "memory", "profile"), "mpt plan"),
    **dict.fromkeys(("debug", "diagnose"), "mpt doctor"),
    **dict.fromkeys(("plot", "show", "summary"), "mpt report"),
    **{word: f"mpt list {word}" for word in ("models", "runs", "configs", "datasets")},
    "ls": "mpt list runs",
    "quantize": "mpt convert",
    "export": "mpt convert",
    "check": "mpt validate",
    "benchmark": "mpt compare",
    "detect": "mpt infer",
}
"""Other programs' commands -> the one that does it here."""
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
        return f"{setting}='{epochs(number)}'"

    return explain


def explain_interval(value: str, given: Mapping[str, str], config: str | None) -> str | None:
    """Translate Lightning's interval: a share of an epoch, or a whole number of batches."""
    number = number_of(value)
    if number is None or "." not in value:
        return None
    return f"train.evaluate_every='{epochs(number)}'"


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
        (
            "gradient_accumulation_steps",
            "accumulate_grad_batches",
            "grad_accum_steps",
            "accumulate",
        ),
        explain_accumulation,
    ),
    **dict.fromkeys(("batch", "batch_size"), explain_share),
    **dict.fromkeys(
        ("save_period", "save_every_n_epochs"), explain_epochs("train.checkpoint_every")
    ),
    "check_val_every_n_epoch": explain_epochs("train.evaluate_every"),
    "sample_every_n_epochs": explain_epochs("train.sample_every"),
    "val_check_interval": explain_interval,
    "warmup_epochs": explain_warmup,
    "warmup_ratio": explain_ratio,
}
