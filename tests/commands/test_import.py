"""`mpt import`: configurations and command lines of other programs, with their units."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from mpt.commands.import_config import Command as ImportArguments
from mpt.commands.import_config import run
from mpt.config.load import load_config
from mpt.errors import ConfigError
from tests.importers.translated import check_translation

TRANSFORMERS = """
{"output_dir": "out", "per_device_train_batch_size": 8, "gradient_accumulation_steps": 4, "max_steps": 2000,
 "learning_rate": 3e-5, "warmup_ratio": 0.1, "bf16": true, "eval_strategy": "epoch", "save_strategy": "steps",
 "save_steps": 500, "save_total_limit": 2, "gradient_checkpointing": true, "push_to_hub": false}
"""
LIGHTNING = """
seed_everything: 7
trainer: {max_epochs: 10, precision: 16-mixed, accumulate_grad_batches: 4, val_check_interval: 0.25, logger: true}
data: {class_path: my.Data, init_args: {batch_size: 16}}
optimizer: {class_path: torch.optim.AdamW, init_args: {lr: 0.001, weight_decay: 0.05}}
"""
ULTRALYTICS = """
task: detect
model: yolov8s.pt
data: coco128.yaml
epochs: 50
patience: 20
batch: 16
imgsz: 640
save_period: 5
optimizer: SGD
lr0: 0.01
lrf: 0.02
box: 7.5
mosaic: 0.8
fliplr: 0.0
scale: 0.4
degrees: 0.0
shear: 2.0
close_mosaic: 5
multi_scale: true
max_det: 100
agnostic_nms: true
amp: true
"""
TIMM = """
python train.py --model resnet50 --data-dir /data/imagenet --opt sgd --lr 0.4 --batch-size 128 \\
  --grad-accum-steps 2 --epochs 100 --sched cosine --warmup-epochs 5 --amp --amp-dtype bfloat16 --model-ema \\
  --model-ema-decay 0.9999 --mixup 0.2 --aa rand-m9 --drop-path 0.1 --drop 0
"""
REFERENCE = """
torchrun --nproc_per_node=8 train.py --model resnet50 --data-path /d --batch-size 128 --opt sgd_nesterov --lr 0.5 \\
  --lr-scheduler cosineannealinglr --lr-warmup-epochs 5 --lr-warmup-method linear --auto-augment ta_wide --epochs 600 \\
  --random-erase 0.1 --weight-decay 0.00002 --norm-weight-decay 0.0 --label-smoothing 0.1 --mixup-alpha 0.2 \\
  --train-crop-size 176 --val-resize-size 232 --model-ema --ra-sampler --ra-reps 4
"""
DEEPFACELAB = """
==================== Model Summary ====================
==            Model name: my_SAEHD                   ==
==     Current iteration: 1200                       ==
==            resolution: 128                        ==
==             face_type: f                          ==
==                 archi: liae-ud                    ==
==               ae_dims: 256                        ==
==                e_dims: 64                         ==
==                d_dims: 64                         ==
==           d_mask_dims: 22                         ==
==            batch_size: 8                          ==
==            lr_dropout: y                          ==
==         autobackup_hour: 1                        ==
"""
CASES: list[tuple[str, str, dict[str, Any], list[str]]] = [
    (
        "trainer.json",
        TRANSFORMERS,
        {
            "train.batch_size": 32,
            "memory.micro_batch": 8,
            "train.steps": 2000,
            "optimizer.warmup_steps": 200,
            "optimizer.schedule": "linear",
            "optimizer.weight_decay": 0.0,
            "precision.mode": "bf16",
            "train.evaluate_every": "1 epoch",
            "train.checkpoint_every": 500,
            "memory.recompute": True,
        },
        [
            "8 x 4 = 32",
            "0.1 x 2000 = 200",
            "#   push_to_hub: false",
            "#   output_dir: out    (runs go to --runs DIR)",
        ],
    ),
    (
        "lightning.yaml",
        LIGHTNING,
        {
            "train.batch_size": 64,
            "memory.micro_batch": 16,
            "train.epochs": 10,
            "precision.mode": "amp",
            "train.evaluate_every": "0.25 epochs",
            "optimizer.name": "adamw",
            "optimizer.lr": 0.001,
            "seed": 7,
        },
        ["16 x 4 = 64", "#   trainer.logger: true"],
    ),
    (
        "args.yaml",
        ULTRALYTICS,
        {
            "model.name": "yolofuse",
            "model.scale": "s",
            "model.image_size": 640,
            "train.batch_size": 64,
            "memory.micro_batch": 16,
            "train.checkpoint_every": "5 epochs",
            "train.early_stopping": {"patience": 20},
            "optimizer.name": "sgd_warmup",
            "optimizer.last_lr": 0.02,
            "task.box_gain": 7.5,
            "dataset.cameras": "rgb",
            "dataset.mosaic": 0.8,
            "dataset.flip_across": 0.0,
            "dataset.scale": 0.4,
            "dataset.saturation": 0.7,
            "dataset.mosaic_epochs": 45,
            "task.multi_scale": 0.5,
            "task.iou": 0.7,
            "task.most_detections": 100,
            "task.agnostic": True,
            "task.best_by": "map50_95",
            "task.small_boxes": True,
            "model.box_bias": 2.0,
        },
        [
            "16 x 4 = 64",
            "#   shear: 2.0    (pictures are changed along",
            "model.weights: yolov8s.pt",
        ],
    ),
    (
        "reference.sh",
        REFERENCE,
        {
            "model.name": "torchvision:resnet50",
            "model.image_size": 176,
            "dataset.test_share": 224 / 232,
            "train.batch_size": 1024,
            "memory.micro_batch": 128,
            "optimizer.nesterov": True,
            "optimizer.no_decay": ["norm"],
            "optimizer.schedule": "cosine",
            "task.mixup": 0.2,
            "precision.mode": "fp32",
        },
        [
            "128 x 8 = 1024",
            "#   ra_sampler: 4 times    (repeated augmentation is not taken over: a picture comes",
            "#   lr_warmup_epochs: 5    (optimizer.warmup_steps: 5 x images / batch;",
            "# model_ema: there 0.998908 after every 32 steps",
        ],
    ),
    (
        "timm.sh",
        TIMM,
        {
            "model.name": "timm:resnet50",
            "model.options": {"drop_path_rate": 0.1},
            "train.batch_size": 256,
            "memory.micro_batch": 128,
            "precision.mode": "bf16",
            "train.ema": {"decay": 0.9999, "ramp_steps": 0, "buffers": "average"},
            "optimizer.momentum": 0.9,
            "task.mixup": 0.2,
            "train.evaluate_every": "1 epoch",
            "dataset.test_share": 0.875,
            "dataset.augment": [
                {"RandomResizedCrop": {"size": 224, "antialias": True}},
                {"RandomHorizontalFlip": {"p": 0.5}},
            ],
            "task.std": [0.229, 0.224, 0.225],
        },
        [
            "128 x 2 = 256",
            "warmup_epochs: 5    (optimizer.warmup_steps: 5 x the steps of an epoch",
            "#   aa: rand-m9",
        ],
    ),
    (
        "my_SAEHD_summary.txt",
        DEEPFACELAB,
        {
            "model.name": "saehd",
            "model.image_size": 128,
            "model.archi": "liae-ud",
            "train.batch_size": 8,
            "optimizer.lr_dropout": 0.3,
            "dataset.face_type": "f",
        },
        ["#   autobackup_hour: 1"],
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
    model = None if "model.name" in settings else "small_cnn"
    check_translation(source, settings, lines, model)


def test_a_command_line_is_translated_from_its_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out.yaml"
    command = "yolo detect train model=yolo11n.pt data=d.yaml batch=0.8 imgsz=320"
    run(ImportArguments(command=command, output=str(output)))
    assert (
        "#   batch: 0.8    (80% of the card: `mpt plan CONFIG --gpu auto --largest` finds the batch)"
        in output.read_text()
    )
    assert "mpt train" in capsys.readouterr().out


def test_a_file_without_a_model_is_written_with_a_place_for_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, output = tmp_path / "t.json", tmp_path / "out.yaml"
    source.write_text(TRANSFORMERS)
    run(ImportArguments(source, output=str(output)))
    assert "set model.name" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"out\.yaml: is there already"):
        run(ImportArguments(source, output=str(output)))


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.json", "{", "is not valid JSON"),
        ("a.toml", "a = ", "is not valid TOML"),
        ("a.yaml", "- 1", "holds no settings"),
        ("a.yaml", "alpha: 1", "not recognised; configurations and command lines are read of"),
        ("a.sh", "echo hello", "no settings"),
        ("a.json", "[" * 100_000, "is not valid JSON"),
    ],
)
def test_what_cannot_be_translated_is_one_line(
    name: str, text: str, said: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=said) as raised:
        run(ImportArguments(tmp_path / name, output=str(tmp_path / "out.yaml")))
    assert len(str(raised.value).splitlines()) == 1


def imported(name: str, text: str, folder: Path) -> tuple[dict[str, Any], str]:
    """Return what a file becomes: its settings by section, and the text."""
    (folder / name).write_text(text)
    output = folder / "out.yaml"
    run(ImportArguments(folder / name, output=str(output), model="small_cnn"))
    return yaml.safe_load(output.read_text()), output.read_text()


def test_timms_own_file_has_no_rate_but_its_base_and_says_when_nothing_decays(
    tmp_path: Path,
) -> None:
    own = "model: vit_tiny\nopt: adamw\nsched: cosine\naa: null\nbatch_size: 128\ngrad_accum_steps: 2\nlr: null\n"
    settings, text = imported(
        "args.yaml", own + "lr_base: 0.1\nlr_base_size: 64\nweight_decay: 0.0\n", tmp_path
    )
    assert settings["optimizer"]["lr"] == 0.2  # 0.1 x sqrt(256 / 64)
    assert settings["optimizer"]["weight_decay"] == 0.0
    assert "lr_base x batch / lr_base_size: 0.1 x sqrt(256 / 64) = 0.2" in text
    other = tmp_path / "sgd"
    other.mkdir()
    settings, text = imported("args.yaml", own.replace("adamw", "sgd"), other)
    assert settings["optimizer"]["lr"] == 0.1  # 0.1 x 256 / 256
    assert settings["optimizer"]["weight_decay"] == 2e-5


def test_timms_pictures_are_changed_and_standardised_as_there(tmp_path: Path) -> None:
    own = "model: vit_tiny\nopt: adamw\nsched: cosine\ndata_dir: /data\nimg_size: 160\nhflip: 0.0\nvflip: 0.2\n"
    own += "scale: [0.2, 1.0]\nmean: [0.5, 0.5, 0.5]\n"
    settings, text = imported("args.yaml", own, tmp_path)
    cut = {"size": 160, "antialias": True, "scale": [0.2, 1.0]}
    jitter = dict.fromkeys(("brightness", "contrast", "saturation"), 0.4)
    assert settings["dataset"]["augment"] == [
        {"RandomResizedCrop": cut},
        {"RandomVerticalFlip": {"p": 0.2}},
        {"ColorJitter": jitter},
    ]
    assert settings["task"]["mean"] == [0.5, 0.5, 0.5]
    assert "#   mean" not in text
    (tmp_path / "b").mkdir()
    settings, _ = imported("args.yaml", f"{own}color_jitter: null\n", tmp_path / "b")
    assert "ColorJitter" not in str(settings["dataset"]["augment"])


def test_lightning_counts_batches_of_a_pass_and_of_a_device(tmp_path: Path) -> None:
    trainer = "{devices: 2, strategy: deepspeed_stage_2, max_steps: 100, max_epochs: 5, accumulate_grad_batches: 4, "
    trainer += "val_check_interval: 100, gradient_clip_val: 0.5, gradient_clip_algorithm: value}"
    settings, text = imported(
        "c.yaml", f"trainer: {trainer}\ndata: {{init_args: {{batch_size: 16}}}}\n", tmp_path
    )
    assert settings["train"]["batch_size"] == 128
    assert settings["memory"]["micro_batch"] == 16
    assert "16 x 4 x 2 = 128" in text
    assert settings["train"]["evaluate_every"] == 25
    assert "clip_grad_norm" not in settings.get("optimizer", {})
    for left in (
        "trainer.gradient_clip_val: 0.5",
        "trainer.strategy: deepspeed_stage_2",
        "trainer.max_epochs: 5",
    ):
        assert f"#   {left}" in text


def test_transformers_evaluates_as_often_as_it_logs_and_takes_shares(tmp_path: Path) -> None:
    own = '{"per_device_train_batch_size": 8, "max_steps": 400, "eval_strategy": "steps", "eval_steps": null, '
    settings, _ = imported("a.json", own + '"logging_steps": 50, "warmup_steps": 0.1}', tmp_path)
    assert settings["train"]["evaluate_every"] == 50
    assert settings["optimizer"]["warmup_steps"] == 40
    (tmp_path / "b").mkdir()
    settings, text = imported("b.json", own + '"logging_steps": 0.05}', tmp_path / "b")
    assert settings["train"]["evaluate_every"] == 20
    assert "#   logging_steps: 0.05" in text
    assert "log_every" not in settings["train"]


def test_kohyas_shares_schedules_and_second_rates_are_not_lost(tmp_path: Path) -> None:
    own = 'train_batch_size = 2\nmax_train_steps = 1600\nlr_scheduler = "cosine_with_restarts"\nlr_warmup_steps = 0.1\n'
    own += (
        'learning_rate = 1e-4\nunet_lr = 5e-5\nnetwork_dim = 8\nnetwork_module = "networks.lora"\n'
    )
    settings, text = imported("k.toml", own, tmp_path)
    assert settings["optimizer"]["lr"] == 5e-5
    assert settings["optimizer"]["warmup_steps"] == 160
    assert "schedule" not in settings["optimizer"]
    assert settings["memory"]["lora"] == {"rank": 8, "alpha": 1.0}
    assert settings["optimizer"]["clip_grad_norm"] == 1.0
    for left in ("learning_rate: 0.0001    (unet_lr", "lr_scheduler: cosine_with_restarts"):
        assert f"#   {left}" in text


def test_onetrainer_counts_passes_and_writes_a_rank_without_a_lora_too(tmp_path: Path) -> None:
    own = '{"training_method": "FINE_TUNE", "train_dtype": "BFLOAT_16", "epochs": 9, "batch_size": 4, '
    own += '"gradient_accumulation_steps": 2, "learning_rate_warmup_steps": 200.0, "lora_rank": 16, "lora_alpha": 1.0, '
    own += '"save_every": 500, "save_every_unit": "STEP", "sample_after": 10, "sample_after_unit": "MINUTE"}'
    settings, text = imported("o.json", own, tmp_path)
    assert settings["optimizer"]["warmup_steps"] == 100
    assert settings["train"]["checkpoint_every"] == 250
    assert "500 / 2 = 250 updates" in text
    assert "lora" not in settings["memory"]
    assert "sample_every" not in settings["train"]
    for left in ("lora_rank: 16", "lora_alpha: 1.0", "sample_after: 10 MINUTE"):
        assert f"#   {left}" in text


TORCH_SGD = "optimizer: {class_path: torch.optim.SGD, init_args: {%s}}\ntrainer: {max_epochs: 1}\n"
HUGGING_FACE = (
    '{"per_device_train_batch_size": 8, "max_steps": 9, "optim": "%s", "weight_decay": 0.1}'
)
YOLO = "imgsz: 64\nlr0: 0.02\nmomentum: 0.8\nbatch: %s\noptimizer: %s\nlrf: 0.1\n"
KOHYA = 'train_batch_size = 2\nmax_train_steps = 9\noptimizer_type = "%s"\n'


@pytest.mark.parametrize(
    ("name", "text", "wanted"),
    [
        ("c.yaml", TORCH_SGD % "", {"lr": 1e-3, "momentum": 0.0}),
        (
            "c.yaml",
            TORCH_SGD % "lr: 0.1, momentum: 0.9, nesterov: true",
            {"lr": 0.1, "momentum": 0.9, "nesterov": True},
        ),
        ("c.yaml", TORCH_SGD.replace("SGD", "RMSprop") % "alpha: 0.9", {"lr": 0.01, "alpha": 0.9}),
        ("t.json", HUGGING_FACE % "sgd", {"momentum": 0.0, "no_decay": ["bias", "norm"]}),
        ("t.json", HUGGING_FACE % "lion_32bit", {"betas": [0.9, 0.999], "weight_decay": 0.1}),
        (
            "t.sh",
            "train.py --model r --opt sgd --sched cosine",
            {"momentum": 0.9, "nesterov": True, "no_decay": ["bias", "vector"]},
        ),
        ("t.sh", "train.py --model r --opt momentum --sched none", {"nesterov": False}),
        (
            "t.sh",
            "train.py --model r --opt rmsprop --sched none --opt-eps 1e-3 --momentum 0.8",
            {"alpha": 0.9, "momentum": 0.8, "eps": 1e-3},
        ),
        (
            "a.yaml",
            YOLO % (16, "AdamW"),
            {
                "betas": [0.8, 0.999],
                "no_decay": ["bias", "norm"],
                "weight_decay": 0.0005,
                "clip_grad_norm": 10.0,
            },
        ),
        (
            "a.yaml",
            YOLO % (128, "SGD"),
            {"weight_decay": 0.001, "momentum": 0.8, "lr": 0.02, "warmup_bias_lr": 0.1},
        ),
        (
            "a.yaml",
            (YOLO % (16, "SGD")) + "warmup_epochs: 0\nwarmup_momentum: 0.7\nwarmup_bias_lr: 0.2\n",
            {"accumulation": 4, "warmup": 0, "warmup_momentum": 0.7, "warmup_bias_lr": 0.2},
        ),
        (
            "a.yaml",
            YOLO % (64, "auto"),
            {"lr": 0.01, "warmup_bias_lr": 0.0, "warmup_momentum": 0.8},
        ),
        (
            "k.toml",
            KOHYA % "SGDNesterov",
            {"momentum": 0.9, "nesterov": True, "lr": 2e-6, "clip_grad_norm": 1.0},
        ),
        ("k.toml", KOHYA % "AdamW", {"lr": 2e-6, "clip_grad_norm": 1.0}),
    ],
)
def test_an_optimizer_is_theirs_also_where_its_defaults_are_others_here(
    name: str, text: str, wanted: dict[str, Any], tmp_path: Path
) -> None:
    settings, _ = imported(name, text, tmp_path)
    found = {key: settings["optimizer"].get(key) for key in wanted}
    assert found == wanted


def test_a_constant_schedule_has_no_warm_up_where_theirs_has_none(tmp_path: Path) -> None:
    text = '{"per_device_train_batch_size": 8, "warmup_steps": 9, "lr_scheduler_type": "%s"}'
    for name, source, has in (
        ("t.json", text % "constant", False),
        ("t.json", text % "constant_with_warmup", True),
        ("k.toml", (KOHYA % "AdamW") + "lr_warmup_steps = 9\n", False),
        ("k.toml", (KOHYA % "AdamW") + 'lr_warmup_steps = 9\nlr_scheduler = "linear"\n', True),
    ):
        folder = tmp_path / f"{name}{has}"
        folder.mkdir()
        settings, written = imported(name, source, folder)
        assert settings["optimizer"].get("warmup_steps") == (9 if has else None)
        assert ("constant goes without one there" in written) is not has


def test_a_script_of_diffusers_is_not_taken_for_kohyas(tmp_path: Path) -> None:
    text = "train_text_to_image_lora.py --pretrained_model_name_or_path x --train_batch_size 2 --rank 8 "
    text += "--num_train_epochs 5 --checkpointing_steps 50 --adam_beta1 0.8 --adam_weight_decay 0.1"
    settings, written = imported("d.sh", text, tmp_path)
    assert settings["train"]["epochs"] == 5
    assert settings["train"]["checkpoint_every"] == 50
    assert settings["memory"]["lora"] == {"rank": 8, "alpha": 8}
    assert settings["optimizer"]["betas"] == [0.8, 0.999]
    assert settings["optimizer"]["weight_decay"] == 0.1
    assert "lr" not in settings["optimizer"]
    assert "#   learning_rate: the script's own    (not given: set optimizer.lr as its" in written
    (tmp_path / "whole").mkdir()
    text = "train_unconditional.py --train_data_dir d --num_epochs 7 --train_batch_size 4"
    settings, written = imported("d.sh", text, tmp_path / "whole")
    wanted = {"betas": [0.95, 0.999], "weight_decay": 1e-6, "lr": 1e-4, "schedule": "cosine"}
    wanted |= {"warmup_steps": 500, "clip_grad_norm": 1.0}
    assert {name: settings["optimizer"][name] for name in wanted} == wanted
    assert (settings["train"]["batch_size"], settings["train"]["epochs"]) == (4, 7)


def test_defaults_that_cannot_be_translated_are_comments(tmp_path: Path) -> None:
    text = "train.py --model r --opt sgd --sched cosine --clip-grad 1 --clip-mode value"
    settings, written = imported("t.sh", text, tmp_path)
    assert "clip_grad_norm" not in settings["optimizer"]
    assert "#   clip_grad: 1    (clip_mode: value;" in written
    assert "#   warmup_epochs: 5    (there by default; optimizer.warmup_steps: 5 x" in written
    (tmp_path / "repeats").mkdir()
    _, written = imported("t.sh", text + " --aug-repeats 3", tmp_path / "repeats")
    assert "#   aug_repeats: 3    (repeated augmentation is not taken over" in written
    (tmp_path / "reference").mkdir()
    text = "train.py --model mobilenet_v2 --wd 4e-5 --lr-step-size 1 --lr-gamma 0.98"
    settings, written = imported("r.sh", text, tmp_path / "reference")
    assert settings["optimizer"]["weight_decay"] == 4e-5
    assert "no_decay" not in settings["optimizer"]
    assert "#   lr_scheduler: steplr    (there by default; schedules are constant," in written
    (tmp_path / "yolo").mkdir()
    _, written = imported("a.yaml", YOLO % (16, "Adam"), tmp_path / "yolo")
    assert "#   lrf: 0.1    (the rate of this optimizer falls to 0 here)" in written
    assert (
        "#   warmup_epochs: 3.0    (there by default; optimizer.warmup_steps: 3 x images" in written
    )
    (tmp_path / "auto").mkdir()
    settings, written = imported(
        "a.yaml", (YOLO % (16, "auto")) + "model: yolo26n.pt\nepochs: 7\n", tmp_path / "auto"
    )
    assert settings["task"]["one_to_many_epochs"] == 7
    assert "#   lr0: 0.02    (optimizer: auto goes past it there)" in written
    assert (
        "#   optimizer: auto    (SGD there (MuSGD since 8.4) if images / 64 x epochs exc" in written
    )
    assert "(there by default; optimizer.warmup: 3 x images / 16, in batches (before 8.4" in written
    (tmp_path / "adafactor").mkdir()
    _, written = imported("t.json", HUGGING_FACE % "adafactor", tmp_path / "adafactor")
    assert "#   optim: adafactor    (there a step has the rate's size" in written


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        (
            "t.json",
            HUGGING_FACE.replace("8", '"auto"') % "sgd",
            "per_device_train_batch_size, auto,",
        ),
        (
            "c.yaml",
            "trainer: {max_steps: many}\n",
            "trainer.max_steps, many, is not understood as L",
        ),
        ("a.yaml", YOLO % ("[1]", "SGD"), "batch, - 1, is not"),
        (
            "k.toml",
            KOHYA.replace("2", "true", 1) % "AdamW" + 'learning_rate = "x"',
            "learning_rate, x,",
        ),
    ],
)
def test_a_value_of_another_kind_is_refused_by_its_name(
    name: str, text: str, said: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=f"the value of {said}"):
        imported(name, text, tmp_path)


def test_a_comment_holds_no_character_that_yaml_refuses(tmp_path: Path) -> None:
    _, text = imported(
        "t.json", HUGGING_FACE.replace("}", ', "hub": "a\\u0000b"}') % "sgd", tmp_path
    )
    assert "hub" in text
    assert "\x00" not in text


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            "python train_dual.py --batch 32 --epochs 100 --data llvip.yaml",
            {"fusion": "mid", "cameras": "pair", "root": "llvip.yaml", "batch_size": 64},
        ),
        (
            "python train_dual.py --epochs 2 --imgsz 320 --lr0 0.1 --model Easy-level-Feature-Fusion.yaml",
            {"fusion": "easy", "cameras": "pair", "batch_size": 64},
        ),
        (
            "yolo train model=ultralytics/cfg/models/fuse/DEYOLO.yaml data=d.yaml",
            {"fusion": "deyolo", "cameras": "pair", "batch_size": 64},
        ),
        ("yolo train model=yolov8n.pt data=d.yaml", {"fusion": "rgb", "cameras": "rgb"}),
    ],
)
def test_yolofuses_own_command_and_networks_are_of_two_cameras(
    words: str, expected: dict[str, Any], tmp_path: Path
) -> None:
    output = tmp_path / "out.yaml"
    run(ImportArguments(command=words, output=str(output)))
    found = yaml.safe_load(output.read_text())
    load_config(output)
    flat = {**found["model"], **found["dataset"], **found["train"]}
    assert {name: flat[name] for name in expected} == expected
    # YOLOFuse is made of a release before 8.4
    assert ("small_boxes" in found["task"]) == (found["model"]["fusion"] == "rgb")
    if "train_dual" in words:  # its mosaic goes on to the end, and it never stops early
        assert "mosaic_epochs" not in flat
        assert "early_stopping" not in flat
