"""`mpt import`: settings of programs that train diffusion models."""

from pathlib import Path
from typing import Any

import pytest

from mpt.importers.shared.recognising import translate_file
from tests.importers.translated import check_translation

KOHYA = """
[train]
pretrained_model_name_or_path = "sd15.safetensors"
train_batch_size = 2
gradient_accumulation_steps = 4
max_train_epochs = 12
network_dim = 16
network_alpha = 8
learning_rate = 1e-4
optimizer_type = "AdamW8bit"
mixed_precision = "fp16"
save_every_n_epochs = 1
text_encoder_lr = 5e-5
"""
ONE_TRAINER = """
{"training_method": "LORA", "epochs": 20, "batch_size": 4, "gradient_accumulation_steps": 2, "learning_rate": 0.0003,
 "train_dtype": "BFLOAT_16", "optimizer": {"optimizer": "ADAMW", "weight_decay": 0.01}, "lora_rank": 32,
 "save_every": 2, "save_every_unit": "EPOCH"}
"""
CASES: list[tuple[str, str, dict[str, Any], list[str]]] = [
    (
        "kohya.toml",
        KOHYA,
        {
            "train.batch_size": 8,
            "memory.micro_batch": 2,
            "train.epochs": 12,
            "memory.lora": {"rank": 16, "alpha": 8},
            "memory.low_bit_optimizer": True,
            "train.checkpoint_every": "1 epoch",
        },
        [
            "2 x 4 = 8",
            "#   pretrained_model_name_or_path: sd15.safetensors",
            "prepare --text-encoders",
        ],
    ),
    (
        "onetrainer.json",
        ONE_TRAINER,
        {
            "train.batch_size": 8,
            "train.epochs": 20,
            "precision.mode": "bf16",
            "train.checkpoint_every": "2 epochs",
        },
        ["4 x 2 = 8", "#   training_method: LORA"],
    ),
]


@pytest.mark.parametrize(
    ("name", "text", "settings", "lines"), CASES, ids=[case[0] for case in CASES]
)
def test_settings_keep_their_meaning_and_what_has_no_counterpart_is_a_comment(
    name: str, text: str, settings: dict[str, Any], lines: list[str], tmp_path: Path
) -> None:
    source = tmp_path / name
    source.write_text(text)
    check_translation(source, settings, lines, "small_cnn")


def test_a_file_of_lightning_with_settings_of_the_same_names_is_not_taken_for_one(
    tmp_path: Path,
) -> None:
    source = tmp_path / "lightning.yaml"
    model = "{pretrained_model_name_or_path: a, network_dim: 4}"
    source.write_text(
        f"trainer: {{max_epochs: 2}}\nmodel: {model}\ndata: {{train_batch_size: 4}}\n"
    )
    assert translate_file(source)[1] == "LightningCLI"
