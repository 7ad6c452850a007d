"""Settings of kohya's sd-scripts (TOML, or a command line), diffusers' example scripts and OneTrainer (JSON): length,
batch, rate, precision.

Their files name weights and folders, not a network: the model is to be set. OneTrainer counts passes, the others
updates. The defaults of diffusers' scripts differ from one to the next: what is not given is said, not guessed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mpt.importers.shared.translation import Translation, is_true
from mpt.importers.shared.translation import epochs as period

NAME = "kohya's sd-scripts, diffusers' examples or OneTrainer"
KOHYA = (
    "train_batch_size",
    "max_train_steps",
    "max_train_epochs",
    "network_dim",
    "pretrained_model_name_or_path",
)
ONE_TRAINER = ("training_method", "optimizer.optimizer", "train_dtype", "concept_file_name")
DIFFUSERS = (
    *("num_train_epochs", "num_epochs", "checkpointing_steps", "instance_data_dir", "dataset_name"),
    *(
        "validation_prompt",
        "center_crop",
        "adam_beta1",
        "max_train_samples",
        "ema_inv_gamma",
        "rank",
    ),
)
"""Settings of diffusers' scripts that kohya's do not have."""
UNCONDITIONAL = {
    "train_batch_size": 16,
    "learning_rate": 1e-4,
    "lr_scheduler": "cosine",
    "lr_warmup_steps": 500,
    "adam_beta1": 0.95,
    "adam_weight_decay": 1e-6,
}
"""The defaults of train_unconditional.py, which alone counts `num_epochs`."""
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
SCHEDULES = {
    "constant": "constant",
    "constant_with_warmup": "constant",
    "linear": "linear",
    "cosine": "cosine",
}
PRECISIONS = {
    "fp16": "amp",
    "bf16": "bf16",
    "no": "fp32",
    "float_16": "amp",
    "bfloat_16": "bf16",
    "float_32": "fp32",
    "tfloat_32": "tf32",
}

TEXT_ENCODERS = (
    *(
        "text_encoder_lr",
        "text_encoder_lr1",
        "text_encoder_lr2",
        "text_encoder_learning_rate",
        "train_text_encoder",
    ),
    *("text_encoder.train", "text_encoder_2.train", "text_encoder.learning_rate"),
)
"""Settings by which text encoders are trained."""


def recognises(given: Mapping[str, Any], words: str) -> bool:
    """Return whether two settings of either program are there, in no file of LightningCLI's."""
    if any(name.startswith("trainer.") for name in given):
        return False
    bare = {name.rpartition(".")[2] for name in given}
    return (
        sum(name in bare for name in KOHYA) >= 2
        or sum(name in given for name in ONE_TRAINER) >= 2
        or ("train_batch_size" in given and sum(name in given for name in DIFFUSERS) >= 1)
    )


def translate(into: Translation) -> None:
    """Take the settings that both have, by either's names. kohya's TOML may have sections, which mean nothing there."""
    is_one_trainer = any(name in into.given for name in ONE_TRAINER)
    if not is_one_trainer:
        into.given = {name.rpartition(".")[2]: value for name, value in into.given.items()}
    is_diffusers = not is_one_trainer and any(name in into.given for name in DIFFUSERS)
    is_kohya = not is_one_trainer and not is_diffusers
    if is_diffusers:
        translate_diffusers(into)
    epochs = into.take("max_train_epochs", "epochs")
    if epochs:
        into.put("train.epochs", float(epochs), f"epochs: {epochs}")
        into.leave_all(("max_train_steps",), "the epochs go before it")
    elif not is_diffusers:
        into.move("max_train_steps", "train.steps", int, default=1600)
    passes = int(into.take("gradient_accumulation_steps", default=1))
    per_pass = int(into.take("train_batch_size", "batch_size", default=1))
    into.batch(per_pass, passes, ("train_batch_size", "gradient_accumulation_steps"))
    counted = passes if "training_method" in into.given else 1
    translate_optimizer(into, counted, is_kohya, is_one_trainer)
    written = str(into.take("mixed_precision", "train_dtype", default="no")).casefold()
    into.put(
        "precision.mode",
        PRECISIONS.get(written, "fp32"),
        f"mixed_precision or train_dtype: {written}",
    )
    if is_true(into.take("full_fp16")):
        into.put("precision.mode", "fp16-pure", "full_fp16: true")
    if is_true(into.take("full_bf16")):
        into.put("precision.mode", "bf16-pure", "full_bf16: true")
    checkpointing = into.take("gradient_checkpointing")
    if is_true(checkpointing) or str(checkpointing).upper() == "ON":
        into.put("memory.recompute", True, f"gradient_checkpointing: {checkpointing}")
    elif str(checkpointing).upper() == "CPU_OFFLOADED":
        into.put(
            "memory.recompute",
            True,
            "gradient_checkpointing: CPU_OFFLOADED; memory.offload_activations moves more",
        )
    if into.given.get("training_method", "LORA") != "LORA":
        into.leave_all(("lora_rank", "lora_alpha"), "of no use there without training_method: LORA")
    if rank := into.take("network_dim", "lora_rank"):
        into.put("memory.lora.rank", int(rank), f"network_dim or lora_rank: {rank}")
        into.move("network_alpha", "memory.lora.alpha", float)
        into.move("lora_alpha", "memory.lora.alpha", float)
        if "memory.lora.alpha" not in into.settings:
            into.put("memory.lora.alpha", 1.0, "network_alpha or lora_alpha is 1 there by default")
    translate_periods(into, counted)
    into.leave_all(
        TEXT_ENCODERS,
        "text encoders train, at optimizer.lr, if `mpt diffusion prepare --text-encoders` made the data",
    )
    into.move("seed", "seed", int)
    into.move("max_data_loader_n_workers", "dataset.workers", int)
    into.move("dataloader_threads", "dataset.workers", int)
    into.move("output_name", "name")
    into.leave_all(("output_dir", "output_model_destination"), "runs go to --runs DIR")


def translate_diffusers(into: Translation) -> None:
    """Take the settings that only diffusers' scripts have; of others that are not given, say that they are its own."""
    if "num_epochs" in into.given:
        into.given = {**UNCONDITIONAL, **into.given}
    epochs, steps = into.take("num_train_epochs", "num_epochs"), into.take("max_train_steps")
    if steps:
        into.put("train.steps", int(steps), f"max_train_steps: {steps}")
    elif epochs:
        into.put("train.epochs", float(epochs), f"num_train_epochs: {epochs}")
    wanted = {
        "train_batch_size": "train.batch_size",
        "learning_rate": "optimizer.lr",
        "lr_scheduler": "optimizer.schedule",
        "lr_warmup_steps": "optimizer.warmup_steps",
    }
    wanted |= {} if steps or epochs else {"num_train_epochs": "train.epochs"}
    for name, path in wanted.items():
        if into.given.get(name) is None:
            into.leave(name, "the script's own", f"not given: set {path} as its --help says")
    if rank := into.take("rank"):
        alpha = into.take("lora_alpha", default=rank)
        into.put("memory.lora.rank", int(rank), f"rank: {rank}")
        into.put("memory.lora.alpha", float(alpha), f"lora_alpha: {alpha}, or the rank")
    betas = [into.take(f"adam_beta{number}") for number in (1, 2)]
    if any(betas):
        found = [float(one or usual) for one, usual in zip(betas, (0.9, 0.999), strict=True)]
        into.put("optimizer.betas", found, f"adam_beta1, adam_beta2: {found[0]}, {found[1]}")
    into.move("adam_weight_decay", "optimizer.weight_decay", float)
    into.move("adam_epsilon", "optimizer.eps", float)
    into.move("checkpointing_steps", "train.checkpoint_every", int)
    if is_true(into.take("use_8bit_adam")):
        into.put("memory.low_bit_optimizer", True, "use_8bit_adam: true")
    into.leave_all(("use_ema",), "train.ema: its decay rises there by a power of the step")


def translate_optimizer(
    into: Translation, passes: int, is_kohya: bool, is_one_trainer: bool
) -> None:
    """Take the optimizer, its rate and its schedule; `passes` of their steps make an update.

    kohya's defaults are put in; OneTrainer writes all of its settings.
    """
    written = str(into.take("optimizer_type", "optimizer.optimizer", default="AdamW"))
    name = OPTIMIZERS.get(written.casefold())
    into.put("optimizer.name", name or "adamw", f"optimizer: {written}")
    if name is None:
        into.leave("optimizer", written, "see `mpt list optimizers`")
    if "8bit" in written.casefold() or "8_bit" in written.casefold():
        into.put("memory.low_bit_optimizer", True, f"optimizer: {written}")
    if name == "sgd":
        has_nesterov = written.casefold() == "sgdnesterov"
        momentum = into.take("optimizer.momentum", default=0.9 if has_nesterov else 0.0)
        into.put("optimizer.momentum", float(momentum), f"optimizer: {written}")
        into.put("optimizer.nesterov", has_nesterov, f"optimizer: {written}")
    rate = into.take("unet_lr", "learning_rate")
    if rate is not None:
        into.put("optimizer.lr", float(rate), f"learning_rate: {rate}")
    elif is_kohya:
        into.put("optimizer.lr", 2e-6, "learning_rate is 2e-6 there by default")
    into.move("optimizer.weight_decay", "optimizer.weight_decay", float)
    into.move(
        "max_grad_norm",
        "optimizer.clip_grad_norm",
        lambda value: float(value) or None,
        default=None if is_one_trainer else 1.0,
    )
    into.move("clip_grad_norm", "optimizer.clip_grad_norm", lambda value: float(value) or None)
    written = str(
        into.take("lr_scheduler", "learning_rate_scheduler", default="constant")
    ).casefold()
    if written in SCHEDULES:
        into.put("optimizer.schedule", SCHEDULES[written], f"lr_scheduler: {written}")
    else:
        into.leave("lr_scheduler", written, "schedules are constant, linear, cosine, one_cycle")
    warmup = float(into.take("lr_warmup_steps", "learning_rate_warmup_steps", default=0))
    steps = into.settings.get("train.steps", (None, ""))[0]
    if warmup and written == "constant" and not is_one_trainer:
        into.leave("lr_warmup_steps", warmup, "lr_scheduler: constant goes without one there")
    elif warmup > 1:
        into.updates("optimizer.warmup_steps", warmup, passes, "warmup steps")
    elif warmup and steps:
        into.put(
            "optimizer.warmup_steps", round(warmup * steps), f"warmup: {warmup} x {steps} steps"
        )
    elif warmup:
        into.leave(
            "warmup steps", warmup, f"set optimizer.warmup_steps: {warmup} x the run's steps"
        )


def translate_periods(into: Translation, passes: int) -> None:
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
        names = (
            ("save_every", "save_every_unit")
            if theirs == "save"
            else ("sample_after", "sample_after_unit")
        )
        every, unit = into.take(names[0]), str(into.take(names[1])).upper()
        if every and unit == "EPOCH":
            into.put(f"train.{ours}", period(every), f"{names[0]}: {every} epochs")
        elif every and unit == "STEP":
            into.updates(f"train.{ours}", every, passes, f"{names[0]}, in steps")
        elif every and unit != "NEVER":
            into.leave(names[0], f"{every} {unit}", f"train.{ours} is in steps or epochs")
