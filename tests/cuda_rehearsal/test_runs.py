"""What a run does on a card beside its steps: workers, saves in the background, resumes, a second card, a retry."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.cuda_rehearsal.programs import CLASSIFIER, train
from tests.cuda_rehearsal.test_mended_faults import weights
from tests.cuda_rehearsal.test_modes_and_tricks import TRICKS
from tests.cuda_rehearsal.test_shipped_configs import FURTHER, QUIET, SLOW_IN_HALF, SMALL, attempt
from tests.cuda_rehearsal.torch_cuda import installed

WIDE = CLASSIFIER.replace("features: 4", "features: 32")
WITH_STATE = (
    "optimizer_in_backward: true",
    "cpu_optimizer: true",
    "stream_weights: {min_kibibytes: 0}",
)
"""Tricks that put the optimizer's state or the weights elsewhere."""
EVERY_STEP = ("train.checkpoint_every=1", "train.keep_last=4")
FIGURES = ("train.sample_every=1", "train.evaluate_every=1")


def words_of(config: str) -> tuple[str, ...]:
    """Return a shipped config's further settings, in float32 if a CPU's half precision takes too long."""
    return (*FURTHER.get(config, ()), *(["precision=fp32"] if config in SLOW_IN_HALF else []))


def test_workers_are_forked_while_the_card_is_in_use(tmp_path: Path) -> None:
    """They begin at the first batch, after the networks are on the card, and again for each evaluation."""
    said = train(tmp_path, CLASSIFIER, "dataset.workers=2", "train.evaluate_every=2")
    assert said.code == 0, said
    alone = train(tmp_path, CLASSIFIER, "train.evaluate_every=2", "name=alone")
    assert alone.code == 0, alone
    assert weights(tmp_path / "runs/run", 4) == weights(tmp_path / "runs/alone", 4)


def test_a_batch_is_kept_until_the_backward_has_read_it(tmp_path: Path) -> None:
    """A loss that saves its target, in a mode whose one question is answered before the backward is done."""
    os.chdir(tmp_path)
    said = attempt("vae", SMALL["vae"], 3, "run", "precision=fp32")
    assert said.code == 0, said


def test_a_save_in_the_background_holds_what_a_save_at_once_holds(tmp_path: Path) -> None:
    for name, beside in (("beside", "true"), ("at_once", "false")):
        said = train(
            tmp_path, CLASSIFIER, f"name={name}", f"train.asynchronous_save={beside}", *EVERY_STEP
        )
        assert said.code == 0, said
    for step in (1, 2, 3, 4):
        assert weights(tmp_path / "runs/beside", step) == weights(tmp_path / "runs/at_once", step)


def same_tensors(one: Path, other: Path, step: int) -> None:
    """Compare two checkpoints by name: in which order an optimizer has made its states is not a matter of bits."""
    files = [
        sorted((run / "checkpoints" / f"step-{step:08}").glob("*.safetensors"))
        for run in (one, other)
    ]
    assert [path.name for path in files[0]] == [path.name for path in files[1]]
    for first, second in zip(*files, strict=True):
        whole, parts = load_file(first), load_file(second)
        assert whole.keys() == parts.keys()
        bits = {
            name: (whole[name].view(torch.uint8), parts[name].view(torch.uint8))
            for name in whole
            if whole[name].dim()
        }
        assert not [name for name, (left, right) in bits.items() if not torch.equal(left, right)]


def goes_on_bit_for_bit(folder: Path, *words: str) -> None:
    """Train the classifier in one go and with a resume between, and compare the last weights and states."""
    optimizer = "optimizer={name: adam, lr: 0.01}"
    short = ("optimizer=null", optimizer, "train.batch_size=16", *words)
    for name, further in (
        ("whole", ()),
        ("parts", ("train.steps=2",)),
        ("parts", ("--resume", "runs/parts")),
    ):
        said = train(folder, CLASSIFIER, *short, f"name={name}", *further)
        assert said.code == 0, said
    same_tensors(folder / "runs/whole", folder / "runs/parts", 4)


@pytest.mark.parametrize("trick", WITH_STATE)
def test_a_resume_with_a_trick_goes_on_bit_for_bit(trick: str, tmp_path: Path) -> None:
    goes_on_bit_for_bit(tmp_path, f"memory={{{trick}}}")


@pytest.mark.slow
@pytest.mark.parametrize(
    "trick", [trick for trick in TRICKS if trick not in WITH_STATE and "recompute" not in trick]
)
def test_a_resume_with_another_trick_goes_on_bit_for_bit(trick: str, tmp_path: Path) -> None:
    goes_on_bit_for_bit(tmp_path, f"memory={{{trick}}}")


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("config", SMALL)
def test_a_resume_of_a_shipped_config_goes_on_bit_for_bit(config: str, tmp_path: Path) -> None:
    os.chdir(tmp_path)
    saves = ("train.evaluate_every=0", "train.checkpoint_every=2", *words_of(config))
    said = attempt(config, SMALL[config], 4, "whole", *saves)
    assert said.code == 0, said
    # not a shorter training, in which a schedule ends earlier
    shutil.copytree("runs/whole", "runs/parts")
    shutil.rmtree("runs/parts/checkpoints/step-00000004")
    said = attempt(
        config,
        SMALL[config],
        4,
        "parts",
        *saves,
        "--resume",
        "runs/parts/checkpoints/step-00000002",
    )
    assert said.code == 0, said
    same_tensors(tmp_path / "runs/whole", tmp_path / "runs/parts", 4)


ON_SECOND = (
    "vae",
    *(pytest.param(name, marks=pytest.mark.slow) for name in SMALL if name != "vae"),
)


@pytest.mark.timeout(600)
@pytest.mark.cards("rtx3060", "rtx3060")
@pytest.mark.parametrize("config", ON_SECOND)
def test_figures_of_a_run_on_the_second_card_stay_there(config: str, tmp_path: Path) -> None:
    os.chdir(tmp_path)
    assert len(QUIET) == 4
    said = attempt(
        config, SMALL[config], 2, "run", "--device", "cuda:1", *words_of(config), *FIGURES
    )
    assert said.code == 0, said
    assert installed().contexts() == [1]


def test_an_update_that_is_repeated_begins_with_no_more_memory(tmp_path: Path) -> None:
    """The error's traceback holds the graph of the forward that was too much, as long as anybody holds the error."""
    from mpt.engine.recovery import out_of_memory

    (card,) = installed().memory.cards
    update: Any = out_of_memory.update
    climb: Any = out_of_memory.MemoryLadder.climb
    held: list[int] = []
    failed: list[int] = []
    gradients: list[int] = []

    def climbing(ladder: Any, phase: Any, *args: Any) -> Any:
        gradients.append(sum(weight.grad is not None for weight in phase.module.parameters()))
        return climb(ladder, phase, *args)

    def noted(*args: Any, **options: Any) -> Any:
        held.append(card.allocated)
        try:
            return update(*args, **options)
        except torch.OutOfMemoryError:
            failed.append(len(held))
            raise

    out_of_memory.update = noted
    out_of_memory.MemoryLadder.climb = climbing  # type: ignore[method-assign]
    installed().fail_once("aten::convolution_backward", calls_before=7)
    said = train(
        tmp_path,
        WIDE,
        "memory.on_oom=adapt",
        "train.steps=4",
        "train.checkpoint_every=0",
        "train.log_every=9",
    )
    assert said.code == 0, said
    (second,) = failed
    assert held[second] <= held[second - 1]
    assert gradients == [0], "they would lie in segments that the emptied cache cannot return"
