"""Commands on a pretend card: memory that runs out anywhere, inference, conversion, comparisons, plans, two cards."""

import dataclasses
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from mpt.doctor.card.runner import faults, left_over
from scripts.card.gpu_check_features import FEATURES
from tests.cuda_rehearsal.programs import CLASSIFIER, GAN, ROOT, mpt, rows, train
from tests.cuda_rehearsal.torch_cuda import installed
from tests.programs import run_mpt

MIB = 2**20
WIDE = CLASSIFIER.replace("features: 4", "features: 64").replace(
    "batch_size: 32", "batch_size: 256"
)


def hold_all_but(free_bytes: int) -> None:
    """Leave the run so much of the card, as another process would that holds the rest."""
    (card,) = installed().memory.cards
    card.others_bytes = card.capacity_bytes - free_bytes


@pytest.mark.cards("rtx2060")
def test_a_run_that_is_too_large_takes_the_ladder(tmp_path: Path) -> None:
    hold_all_but(80 * MIB)
    said = train(tmp_path, WIDE, "memory.on_oom=adapt", "train.steps=3")
    assert said.code == 0, said
    assert "out of memory; micro-batch 256 -> 128" in said.text
    memory = json.loads((tmp_path / "runs/run/summary.json").read_text())["peak_memory"]
    assert memory["reserved_bytes"] <= 80 * MIB
    again = train(tmp_path, WIDE, "memory.on_oom=adapt", "train.steps=4", "--resume", "runs/run")
    assert again.code == 0, again
    assert "memory ran out before" in again.text


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.cards("rtx2060")
def test_a_batch_that_six_gibibytes_do_not_hold_adapts_to_them(tmp_path: Path) -> None:
    """Nothing is held back or made to fail: the activations are more than the card's memory."""
    large = CLASSIFIER.replace("features: 4, image_size: 8", "features: 16, image_size: 128")
    said = train(tmp_path, large, "train.batch_size=1400", "train.steps=1", "memory.on_oom=adapt")
    assert said.code == 0, said
    assert "out of memory; micro-batch 1400 -> 700" in said.text
    memory = json.loads((tmp_path / "runs/run/summary.json").read_text())["peak_memory"]
    (card,) = installed().memory.cards
    assert 2 * 2**30 < memory["steps_reserved_bytes"] <= card.capacity_bytes < 6 * 2**30
    assert card.out_of_memory


@pytest.mark.parametrize(
    "operator", ["aten::convolution", "aten::convolution_backward", "aten::native_batch_norm"]
)
def test_memory_that_runs_out_in_forward_or_backward_is_adapted_to(
    operator: str, tmp_path: Path
) -> None:
    installed().fail_once(operator, calls_before=7)
    said = train(tmp_path, CLASSIFIER, "memory.on_oom=adapt")
    assert said.code == 0, said
    assert "out of memory" in said.text


@pytest.mark.slow
def test_memory_that_runs_out_in_the_optimizer_stops_in_words(tmp_path: Path) -> None:
    adam = CLASSIFIER.replace("sgd, lr: 0.05", "adam, lr: 0.01")
    installed().fail_once("aten::sqrt")
    installed().fail_once("aten::_foreach_sqrt")
    said = train(tmp_path, adam, "memory.on_oom=adapt", "train.plan_memory=false")
    assert said.code in (0, 7), said
    assert "Traceback" not in said.text


def test_memory_that_runs_out_in_evaluation_is_no_traceback(tmp_path: Path) -> None:
    from mpt.engine.state import evaluation

    (card,) = installed().memory.cards
    original = evaluation.evaluate

    def cramped(*args: object, **kwargs: object) -> object:
        torch.cuda.empty_cache()
        card.others_bytes = card.capacity_bytes - card.reserved
        return original(*args, **kwargs)  # type: ignore[arg-type]

    for module in list(sys.modules.values()):
        if getattr(module, "evaluate", None) is original:
            module.evaluate = cramped  # type: ignore[attr-defined]
    said = train(tmp_path, CLASSIFIER.replace("features: 4", "features: 64"), "train.steps=2")
    assert "Traceback" not in said.text
    assert said.code in (0, 7), said


def test_a_run_is_inferred_from_converted_compared_and_reported(tmp_path: Path) -> None:
    assert train(tmp_path, GAN, "name=one", "train.steps=2", "precision=amp").code == 0
    assert train(tmp_path, GAN, "name=other", "train.steps=2").code == 0
    for words in (
        ("infer", "runs/one"),
        ("infer", "runs/one", "--half"),
        ("infer", "runs/one", "--device", "cpu"),
        ("compare", "runs/one", "runs/other"),
        ("report", "runs/one"),
    ):
        said = mpt(*words)
        assert said.code == 0, (words, str(said))
        assert "Traceback" not in said.text


def test_inference_that_finds_no_memory_says_what_asks_for_less(tmp_path: Path) -> None:
    assert train(tmp_path, CLASSIFIER, "train.steps=1").code == 0
    for words in ((), ("--half",)):
        installed().fail_once("aten::convolution", calls_before=1)
        said = mpt("infer", "runs/run", *words)
        assert said.code == 7, said
        assert "error: out of memory (CUDA out of memory." in said.text
        assert "try a smaller --batch-size, --vram SIZE" in said.text
        assert "Traceback" not in said.text


def test_an_overflow_is_skipped_and_logged(tmp_path: Path) -> None:
    said = train(
        tmp_path, CLASSIFIER, "precision={mode: amp, init_scale: 16777216}", "train.steps=3"
    )
    assert said.code == 0, said
    assert "overflow" in {row["kind"] for row in rows(tmp_path / "runs/run", "events.jsonl")}


@pytest.mark.cards("rtx3060", "h100")
def test_a_run_moves_from_one_card_to_another(tmp_path: Path) -> None:
    assert train(tmp_path, CLASSIFIER, "train.steps=2", "--device", "cuda:0").code == 0
    said = train(tmp_path, CLASSIFIER, "--device", "cuda:1", "--resume", "runs/run")
    assert said.code == 0, said
    assert "RTX 3060 -> NVIDIA H100" in said.text


def test_a_plan_is_made_beside_a_run_and_the_report_holds_both(tmp_path: Path) -> None:
    said = train(
        tmp_path, CLASSIFIER.replace("plan_memory: false", "plan_memory: true"), "train.steps=3"
    )
    assert said.code == 0, said
    assert "memory allocated: planned" in said.text
    assert re.search(r"\([+-]0\.0%\)", said.text), said


@pytest.mark.parametrize("to", ["pt", "safetensors"])
def test_a_run_is_converted_in_half(to: str, tmp_path: Path) -> None:
    assert train(tmp_path, CLASSIFIER, "train.steps=1", "precision=amp").code == 0
    said = mpt("convert", "runs/run", "--half", "--to", to)
    assert said.code == 0, said
    assert list((tmp_path / "runs/run").glob(f"*half.{to}"))


def test_a_card_that_is_not_in_the_table_is_calibrated(tmp_path: Path) -> None:
    """The planning processes see no card: like others, they are started where torch finds none."""
    device = installed()
    device.properties[0] = dataclasses.replace(
        device.properties[0], name="NVIDIA RTX 9090 Laptop GPU"
    )
    os.environ["XDG_CACHE_HOME"] = str(tmp_path / "cache")
    assert train(tmp_path, CLASSIFIER, "train.steps=3").code == 0
    said = mpt("plan", "calibrate", "runs/run")
    assert said.code == 0, said
    assert re.search(r"\([+-]0\.0%\)", said.text), said
    (written,) = (tmp_path / "cache" / "mpt").glob("calibration-*9090*.json")
    assert json.loads(written.read_text())["cudnn_share"] == 0


def test_the_doctor_says_what_the_card_is(tmp_path: Path) -> None:
    os.chdir(tmp_path)
    said = mpt("doctor", "--only", "environment")
    assert "Traceback" not in said.text
    assert "NVIDIA GeForce RTX 3060" in said.text
    assert said.code == 0, said


def test_the_doctor_examines_numerics_on_the_card(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(CLASSIFIER)
    os.chdir(tmp_path)
    said = mpt("doctor", "config.yaml", "precision=amp", "--only", "numerics", "--batch-size", "8")
    assert said.code == 0, said
    assert "float16" in said.text


@pytest.mark.slow
def test_a_comparison_trains_each_mode_in_a_process_of_its_own(tmp_path: Path) -> None:
    os.chdir(tmp_path)
    (tmp_path / "config.yaml").write_text(CLASSIFIER)
    done = run_mpt("compare", "fp32", "amp", "--config", "config.yaml", "--seeds", 1)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "amp" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(5400)
@pytest.mark.parametrize(
    "gpu",
    [
        pytest.param("NVIDIA GeForce RTX 2060", marks=pytest.mark.cards("rtx2060")),  # 6 GB
        pytest.param("NVIDIA H200", marks=pytest.mark.cards("h200")),  # 141 GB
    ],
)
def test_the_gpu_check_runs_in_full_and_goes_on_after_a_kill(tmp_path: Path, gpu: str) -> None:
    folder = tmp_path / "check"
    command = [
        sys.executable,
        ROOT / "scripts" / "gpu_check.py",
        folder,
        "--minutes",
        "45",
        "--small",
    ]
    command += [
        "--config",
        ROOT / "configs" / "classify_digits.yaml",
        "--config",
        ROOT / "configs" / "vae.yaml",
    ]
    rows = folder / "gpu_check_plan.jsonl"
    killed = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while killed.poll() is None and not (rows.exists() and len(rows.read_text().splitlines()) > 1):
        time.sleep(0.5)  # until it is in the middle of the plans
    assert killed.poll() is None
    killed.kill()
    killed.wait()
    before = rows.read_text().splitlines()
    done = subprocess.run(command, capture_output=True, text=True, timeout=2900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    # the last may have been cut short
    assert rows.read_text().splitlines()[: len(before) - 1] == before[:-1]
    results = json.loads((folder / "gpu_check.json").read_text())
    assert results["tests"]["exit_code"] in (0, 5)
    assert results["demo"]["exit_code"] == 0
    assert {entry["config"] for entry in results["configs"]} == {"classify_digits.yaml", "vae.yaml"}
    assert not any(
        "crash" in row for entry in results["configs"] for row in (entry, *entry.get("modes", ()))
    )
    assert not any("crash" in row for row in results["plan"]["rows"])
    off = {row["label"]: row["off"]["allocated"] for row in results["plan"]["rows"] if "off" in row}
    assert off
    assert {label: share for label, share in off.items() if abs(share) > 0.01} == {}
    assert sum("allocated" in row for row in results["plan"]["rows"]) > len(before)
    tried = {row["name"]: row for row in results["features"]["rows"]}
    assert [name for name, row in tried.items() if "said" in row] == list(FEATURES)[:-1]
    assert "needs 2 cards" in tried["sharded checkpoints of two cards"]["skipped"]
    assert not faults(results["features"]["rows"])
    assert not left_over(results["card"]["rows"])
    assert not faults(results["card"]["rows"])
    fits = results["plan"]["fits"]
    assert fits["yes, yes"] > 10  # an RTX 2060 refuses the modes of bfloat16
    assert fits["yes, no"] == fits["no, yes"] == 0
    page = [*command[:3], "--page", tmp_path / "page.md"]
    assert subprocess.run(page, capture_output=True, timeout=60, check=False).returncode == 0
    text = (tmp_path / "page.md").read_text()
    assert text.startswith(f"# gpu_check: {gpu} (rehearsal")
    assert "## What to mend first" in text
