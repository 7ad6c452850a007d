"""Words of other programs, and slips, that are answered with what to type here."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from mpt.cli import main

WORDS = [
    ("train classify_digits", "did you mean @classify_digits, which comes with mpt?"),
    ("train @classify_digits optimizer.lr_rate=3", "did you mean 'lr'?"),
    ("train @classify_digits optimizer.warmup=3", "did you mean 'warmup_steps'?"),
    (
        "train @classify_digits base=mine.yaml",
        "name both, as in `mpt train @classify_digits --with FILE`",
    ),
    ("train configs/dcgan_amp.yaml", "did you mean @dcgan_amp, which comes with mpt?"),
    (
        "train yolov8n.pt",
        "weights are no configuration; a run starts from them with model.weights=yolov8n.pt",
    ),
    (
        "train @classify_digits model=yolov8n.pt",
        "a file of weights: name its model with model.name",
    ),
    (
        "train @classify_digits model.weights=https://x.org/a.pt",
        "nothing is downloaded; fetch the file",
    ),
    ("train @classify_digits --model-ema", "train.ema=0.9999"),
    ("train @classify_digits --wandb", "train.boards=[wandb]"),
    (
        "train @classify_digits --output_dir out",
        "no such option: --output_dir; here it is --runs DIR",
    ),
    ("train @classify_digits --gpu 0", "here it is --device cuda:0"),
    ("train @classify_digits --devices=2", "here it is --nproc 2"),
    ("train @classify_digits --devices", "here it is --nproc VALUE"),
    ("infer --source pictures", "no such option: --source; here it is --input pictures"),
    ("infer --format onnx", "no such option: --format; here it is mpt convert RUN --to onnx"),
    ("yolofuse prune run", "no such command 'prune'; `mpt prune` does that"),
    (
        "infer yolov8n.pt",
        "It would be weights, not a run: mpt train CONFIG model.weights=yolov8n.pt",
    ),
    ("convert --format onnx", "no such option: --format; here it is --to onnx"),
    (
        "infer run pictures",
        "found pictures, where nothing more is expected; write --input pictures",
    ),
    ("evaluate run pictures", "write --data pictures"),
    ("convert run net.onnx", "write --output net.onnx"),
    ("train dcgan", "did you mean @dcgan_amp or @dcgan_fp32 or @dcgan_o1, which come with mpt?"),
    ("train wgan", "did you mean @wgan_gp, which comes with mpt?"),
    ("plan train.py --vrem 6GiB", "did you mean --vram? A script's own follow after --: mpt plan"),
    ("plan train.py --lr 1", "none of its options; a script's own follow after --: mpt plan"),
    (
        "plan step train.py --lr 1",
        "mpt plan step: --lr is none of its options; a script's own follow after --: mpt plan step train.py -- --lr 1",
    ),
    (
        "infer pictures",
        "pictures is a folder of pictures, not a run: mpt infer RUN --input pictures",
    ),
    (
        "train @classify_digits --gradient_accumulation_steps 4",
        "train.batch_size=256 memory.micro_batch=64 (64 x 4 = 256)",
    ),
    (
        "train @classify_digits --per_device_train_batch_size 8 --gradient_accumulation_steps 4",
        "train.batch_size=8",
    ),
    (
        "train @classify_digits --accumulate_grad_batches 4 --batch_size 8",
        "train.batch_size=32 memory.micro_batch=8 (8 x 4 = 32)",
    ),
    (
        "train @classify_digits --batch 0.8",
        "0.8 is a share of the card's memory there (80%); `mpt plan @classify_digits",
    ),
    ("train @classify_digits --batch 16", "train.batch_size=16"),
    ("train @classify_digits --save_period 5", "train.checkpoint_every='5 epochs'"),
    ("train @classify_digits --check_val_every_n_epoch 1", "train.evaluate_every='1 epoch'"),
    ("train @classify_digits --val_check_interval 0.25", "train.evaluate_every='0.25 epochs'"),
    ("train @classify_digits --val_check_interval 500", "train.evaluate_every=500"),
    ("train @classify_digits --max_epochs 3", "train.epochs=3"),
    ("train @classify_digits --warmup_epochs 5", "5 epochs x the steps of an epoch"),
    (
        "train @classify_digits --warmup_ratio 0.1 --max_steps 2000",
        "optimizer.warmup_steps=200 (0.1 x 2000 = 200)",
    ),
    ("train @classify_digits --gradient_checkpointing", "memory.recompute=true"),
    (
        "train @classify_digits train.gradient_accumulation_steps=4",
        "all passes together, and memory.micro_batch one pass",
    ),
    (
        "train @classify_digits train.batch_size=32 --accumulate 2",
        "train.batch_size=64 memory.micro_batch=32 (32 x 2 = 64)",
    ),
    ("train @classify_digits --gpus 2", "here it is --nproc 2"),
    ("resume runs/a", "`mpt train --resume RUN` does that, `mpt train -h` explains it"),
    ("val", "`mpt evaluate` does that"),
    ("eval", "`mpt evaluate` does that"),
    ("test", "`mpt evaluate` does that"),
    (
        "train --resume auto train.steps=70",
        "mpt train CONFIG --resume train.steps=70, or mpt train --resume RUN train",
    ),
    (
        "train train.steps=70",
        "a configuration is expected: FILE.yaml train.steps=70, or @NAME train.steps=70",
    ),
    (
        "train run",
        "a folder; a YAML file is expected; did you mean run/config.yaml, or to continue that run with --resume",
    ),
    ("continue runs/a", "`mpt train --resume RUN` does that"),
    ("runs", "`mpt list runs` does that"),
    ("evaluate model.onnx", "There is no file model.onnx."),
    (
        "infer classify_digits",
        "a configuration and no run: train it first with mpt train @classify_digits",
    ),
    ("evaluate @classify_digits", "train it first with mpt train @classify_digits"),
    ("infer --checkpoint runs/a", "no such option: --checkpoint; here it is mpt infer runs/a"),
    (
        "convert run --to torch",
        "--to: found 'torch'; allowed are pt, safetensors, onnx, peft, diffusers, kohya; for Py",
    ),
    ("convert run --to onnx --dtype float16", "--dtype: it says which half; add --half"),
    (
        "report run --format pdf",
        "no such option: --format; here it is --figures DIR, which writes SVG, PDF and CSV",
    ),
    ("report run --svg", "no such option: --svg; here it is --figures DIR"),
    ("evaluate run --split train", "here it is --data FOLDER"),
    (
        "evaluate run --metrics f1",
        "no such option: --metrics; here it is mpt evaluate RUN, with all metrics",
    ),
    (
        "infer run/checkpoints",
        "run/checkpoints holds checkpoints: name the run, run, or one of them.",
    ),
    (
        "infer run/checkpoints/step-100",
        "run/checkpoints holds no step-100; it has none (train.keep_last says how",
    ),
    ("compare fp32,amp --config @classify_digits", "modes are separated by spaces: fp32 amp"),
    (
        "compare fp32 amp --config @classify_digits --margin 1 %",
        "a margin is written without a space: --margin 1%",
    ),
    ("convert --onnx", "here it is --to onnx"),
    ("plan @classify_digits --memory 6GB", "no such option: --memory; here it is --vram 6GB"),
    ("compare fp32 fp16", "did you mean amp (mixed) or fp16-pure"),
    ("diff fp32 amp", "fp32 is a precision mode: name a configuration or a run before it"),
    (
        "train @classify_digits dataset=my/pictures",
        "did you mean name: image_folder and root: my/pictures?",
    ),
    (
        "train @classify_digits dataset.root=my",
        "this data set takes no folder: your own pictures are dataset.name=image",
    ),
    (
        "train @classify_digits train.evaluate_every=1epohc",
        "a number of steps (200), of epochs (1 epoch",
    ),
    (
        "doctor @classify_digits --dtype fp16",
        "--dtype: found 'fp16'; allowed are float16, bfloat16",
    ),
    ("diff @classify_digits fp32 --dtype fp16", "--dtype: found 'fp16'; allowed are"),
    (
        "train @classify_digits --nproc 3 train.batch_size=2",
        "found 2 samples for 3 processes; it is the batch of all of them together",
    ),
    ("import utf16.json", "utf16.json: cannot be read: it is no text; save it as UTF-8"),
    ("report run other", "write --figures other, or --all for a page over all runs"),
    ("plan check", "LOCK is missing: name a file that `mpt plan lock` wrote"),
    ("plan check utf16.json", "utf16.json is no lock of mpt plan"),
    (
        "plan check empty.lock",
        "empty.lock is no lock of mpt plan; write it anew with mpt plan lock",
    ),
    ("doctor --device xpu", "xpu is asked for, but torch sees no xpu device"),
    ("train @classify_digits --seed x", "mpt train: --seed: found 'x'; allowed: a whole number"),
    (
        "train @classify_digits --smoke 0",
        "mpt train: --smoke: found '0'; allowed: a whole number, 1 or more",
    ),
    ("infer run --top=-1", "--top: found '-1'; allowed: a whole number, 0 or more"),
    ("infer run --top -1", "--top: found '-1'; allowed: a whole number, 0 or more"),
    ("infer run --truncation 2", "--truncation: found '2'; allowed: a number from 0 to 1"),
    ("prune run --share 50%", "--share: found '50%'; allowed: a number from 0.05 to 0.95"),
    ("plan presents @classify_digits", "did you mean mpt plan presets @classify_digits?"),
    ("plan chek a.lock", "did you mean mpt plan check a.lock?"),
    ("init --part model small_cnn", "there is a model named small_cnn already"),
    ("init --part metric f1", "there is a metric named f1 already"),
    ("init --part loss cross_entropy", "there is a loss named cross_entropy already"),
    ("init --part model class", "found the name 'class', a word of Python"),
    ("init mine.yaml --into mine", "--into is of a part: add --part KIND, or leave it out"),
    ("convert run --to onnx --gate x", "--gate: found 'x'; allowed is a positive share"),
    ("import pictures", "pictures: a folder; name a configuration file in it"),
]


@pytest.mark.parametrize(("words", "said"), WORDS, ids=[words for words, _ in WORDS])
def test_what_was_meant_is_said_in_one_line(
    words: str,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pictures").mkdir()
    (tmp_path / "empty.lock").touch()
    (tmp_path / "utf16.json").write_text('{"learning_rate": 1e-4}', "utf-16")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").touch()
    (tmp_path / "run" / "checkpoints").mkdir()
    (tmp_path / "pictures" / "a.png").touch()
    with pytest.raises(SystemExit) as ended:
        main(shlex.split(words))
    shown = capsys.readouterr()
    assert ended.value.code in (2, 4)
    assert said in shown.err
    assert len(shown.err.splitlines()) == 1
    assert shown.out == ""


def test_a_part_file_without_settings_is_named_as_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my" / "nn").mkdir(parents=True)
    (tmp_path / "my" / "nn" / "wide.py").write_text("class Net:\n    pass\n")
    (tmp_path / "c.yaml").write_text("model: wide\n")
    with pytest.raises(SystemExit):
        main(["validate", "c.yaml"])
    assert "my/nn/wide.py is there, but has no `class Settings(Options)`" in capsys.readouterr().err


def test_every_model_is_described_in_its_own_words(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["list", "models", "--json"])
    said = list(json.loads(capsys.readouterr().out)["models"].values())
    assert len(said) == len(set(said)) > 20
    assert not [text for text in said if " Here: " in text]


def test_after_an_error_the_prompt_comes_back_without_unloading_what_was_imported(
    tmp_path: Path,
) -> None:
    """A finalizer stands for torch's; what is registered to run at the end runs."""
    code = (
        "import atexit, sys\n"
        "class Slow:\n"
        "    def __del__(self): print('unloaded', flush=True)\n"
        "slow = Slow()\n"
        "atexit.register(lambda: print('tidied', flush=True))\n"
        "sys.argv = ['mpt', 'validate', 'nowhere.yaml']\n"
        "from mpt.entry_point import main\n"
        "main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=50
    )
    assert (done.returncode, done.stdout) == (2, "tidied\n")
    assert done.stderr.startswith("error: nowhere.yaml: no such file")
