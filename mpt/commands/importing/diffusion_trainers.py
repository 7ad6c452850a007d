"""What kohya's sd-scripts (TOML, or a command line) and OneTrainer (JSON) train with: length, batch, rate, precision.

Their models are not mpt's. The rest of their settings is translated for a model of your own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mpt.commands.importing.translation import Translation, is_true
from mpt.commands.importing.translation import epochs as period

NAME = "kohya's sd-scripts or OneTrainer"
KOHYA = ("train_batch_size", "max_train_steps", "max_train_epochs", "network_dim", "pretrained_model_name_or_path")
ONE_TRAINER = ("training_method", "optimizer.optimizer", "train_dtype", "concept_file_name")
OPTIMIZERS = {
    "adamw": "adamw",
    "adam": "adam",
    "adamw8bit": "adamw",
    "adamw_8bit": "adamw",
    "lion": "lion",
    "adafactor": "adafactor",
    "sgd": "sgd",
    "sgdnesterov": "sgd",
}
SCHEDULES = {"constant": "constant", "constant_with_warmup": "constant", "linear": "linear", "cosine": "cosine"}
PRECISIONS = {
    "fp16": "amp",
    "bf16": "bf16",
    "no": "fp32",
    "float_16": "amp",
    "bfloat_16": "bf16",
    "float_32": "fp32",
    "tfloat_32": "tf32",
}
UNITS = {"EPOCH": "epoch", "STEP": "step"}


def recognises(given: Mapping[str, Any], words: str) -> bool:
    """Return whether two settings of either program are there."""
    bare = {name.rpartition(".")[2] for name in given}
    return sum(name in bare for name in KOHYA) >= 2 or sum(name in given for name in ONE_TRAINER) >= 2


def translate(into: Translation) -> None:
    """Take what both have, by either's names. kohya's TOML may have sections, which mean nothing there."""
    if not any(name in into.given for name in ONE_TRAINER):
        into.given = {name.rpartition(".")[2]: value for name, value in into.given.items()}
    steps = into.take("max_train_steps")
    epochs = into.take("max_train_epochs", "epochs")
    if epochs:
        into.put("train.epochs", float(epochs), f"epochs: {epochs}")
    else:
        into.put("train.steps", int(steps or 1600), f"max_train_steps: {steps or 1600}")
    into.batch(
        int(into.take("train_batch_size", "batch_size", default=1)),
        int(into.take("gradient_accumulation_steps", default=1)),
        ("train_batch_size", "gradient_accumulation_steps"),
    )
    translate_optimizer(into)
    written = str(into.take("mixed_precision", "train_dtype", default="no")).casefold()
    into.put("precision.mode", PRECISIONS.get(written, "fp32"), f"mixed_precision or train_dtype: {written}")
    if is_true(into.take("full_fp16")):
        into.put("precision.mode", "fp16-pure", "full_fp16: true")
    if is_true(into.take("full_bf16")):
        into.put("precision.mode", "bf16-pure", "full_bf16: true")
    checkpointing = into.take("gradient_checkpointing")
    if is_true(checkpointing) or str(checkpointing).upper() == "ON":
        into.put("memory.recompute", True, f"gradient_checkpointing: {checkpointing}")
    elif str(checkpointing).upper() == "CPU_OFFLOADED":
        into.put(
            "memory.recompute", True, "gradient_checkpointing: CPU_OFFLOADED; memory.offload_activations moves more"
        )
    if rank := into.take("network_dim", "lora_rank"):
        into.put("memory.lora.rank", int(rank), f"network_dim or lora_rank: {rank}")
        into.move("network_alpha", "memory.lora.alpha", float)
        into.move("lora_alpha", "memory.lora.alpha", float)
    translate_periods(into)
    into.move("seed", "seed", int)
    into.move("max_data_loader_n_workers", "dataset.workers", int)
    into.move("dataloader_threads", "dataset.workers", int)
    into.move("output_name", "name")
    into.leave_all(("output_dir", "output_model_destination"), "runs go to --runs DIR")


def translate_optimizer(into: Translation) -> None:
    """Take the optimizer, its rate and its schedule."""
    written = str(into.take("optimizer_type", "optimizer.optimizer", default="AdamW"))
    name = OPTIMIZERS.get(written.casefold())
    into.put("optimizer.name", name or "adamw", f"optimizer: {written}")
    if name is None:
        into.leave("optimizer", written, "see `mpt list optimizers`")
    if "8bit" in written.casefold() or "8_bit" in written.casefold():
        into.put("memory.low_bit_optimizer", True, f"optimizer: {written}")
    rate = into.take("learning_rate", "unet_lr")
    if rate is not None:
        into.put("optimizer.lr", float(rate), f"learning_rate: {rate}")
    into.move("optimizer.weight_decay", "optimizer.weight_decay", float)
    into.move("max_grad_norm", "optimizer.clip_grad_norm", lambda value: float(value) or None)
    into.move("clip_grad_norm", "optimizer.clip_grad_norm", lambda value: float(value) or None)
    written = str(into.take("lr_scheduler", "learning_rate_scheduler", default="constant")).casefold()
    into.put("optimizer.schedule", SCHEDULES.get(written, "constant"), f"lr_scheduler: {written}")
    if warmup := into.take("lr_warmup_steps", "learning_rate_warmup_steps"):
        into.put("optimizer.warmup_steps", int(float(warmup)), f"warmup steps: {warmup}")


def translate_periods(into: Translation) -> None:
    """Take how often it saves and samples: kohya counts epochs or steps, OneTrainer names the unit."""
    if every := into.take("save_every_n_epochs"):
        into.put("train.checkpoint_every", period(every), f"save_every_n_epochs: {every}")
    if every := into.take("save_every_n_steps"):
        into.put("train.checkpoint_every", int(every), f"save_every_n_steps: {every}")
    if every := into.take("sample_every_n_epochs"):
        into.put("train.sample_every", period(every), f"sample_every_n_epochs: {every}")
    if every := into.take("sample_every_n_steps"):
        into.put("train.sample_every", int(every), f"sample_every_n_steps: {every}")
    for theirs, ours in (("save", "checkpoint_every"), ("sample_after", "sample_every")):
        names = ("save_every", "save_every_unit") if theirs == "save" else ("sample_after", "sample_after_unit")
        every, unit = into.take(names[0]), UNITS.get(str(into.take(names[1])).upper())
        if every and unit:
            value = period(every) if unit == "epoch" else int(every)
            into.put(f"train.{ours}", value, f"{names[0]}: {every} {unit}")
