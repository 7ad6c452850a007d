"""Every shipped config in every precision mode and with every memory trick on a pretend card, large ones made smaller.

All but one pair for each trick are slow: `python -m pytest -m slow tests/cuda_rehearsal/test_configs_modes_tricks.py`.
"""

import json
import os
from collections.abc import Callable
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import pytest

from tests.cuda_rehearsal.programs import MODES
from tests.cuda_rehearsal.test_shipped_configs import (
    DRAWN_FACES,
    FURTHER,
    SHRUNK,
    SMALL,
    UNSHIPPED_DATA,
    Planner,
    attempt,
)
from tests.cuda_rehearsal.torch_cuda import installed
from tests.test_configs import folder_of_images, folder_of_triplets

MIB = 2**20
CONFIGS: dict[str, tuple[int, tuple[str, ...]]] = {
    **{name: (batch, FURTHER.get(name, ())) for name, batch in SMALL.items()},
    **{
        name: (batch, ("dataset.workers=0", *words))
        for name, (batch, words) in UNSHIPPED_DATA.items()
    },
    "saehd_512": (2, (*DRAWN_FACES, *(f"model.{size}" for size in SHRUNK))),
}
"""Every shipped config with its batch and what makes it small enough."""
# whose regularisers would begin after more steps than are taken here
for name in ("stylegan2_16", "stylegan2_256"):
    CONFIGS[name] = (CONFIGS[name][0], (*CONFIGS[name][1], "task.r1_every=2", "task.path_every=2"))
HALF, CASTS = "{mode: amp, init_scale: 16}", "{mode: O1, init_scale: 16}"
"""With a scale at which the first step is no overflow, so that optimizers have their state within three."""
TURNS = ("fp32", HALF, "bf16", CASTS)
"""Modes that tricks are tried in, in turn."""
TRICKS = {
    "channels_last": "true",
    "cpu_optimizer": "true",
    "empty_cache_every": "1",
    "expandable_segments": "true",
    "lora": "{rank: 2}",
    "micro_batch": "1",
    "offload_activations": "0.0",
    "optimizer_in_backward": "true",
    "park_optimizer": "true",
    "recompute": "sqrt",
    "release_grads_after": "true",
    "set_to_none": "false",
    "stream_weights": "{min_kibibytes: 0}",
    "prune": "0.5",
}
"""With settings by which they do something to small networks. Not here: those that compile kernels for the card."""
REFUSED_TRICKS = {
    # They have no Linear layer or 1x1 convolution of torch's own, but for the last, which is trained as it is.
    "lora": {
        *(
            "classify_digits",
            "dain_demo",
            "dain_vimeo",
            "dcgan_amp",
            "dcgan_fp32",
            "dcgan_o1",
            "rife_demo",
        ),
        *("saehd_512", "saehd_demo", "stylegan2_16", "stylegan2_256"),
    },
    "optimizer_in_backward": {
        "dain_demo",
        "rife_demo",
        "saehd_512",
        "yolofuse_demo",
        "yolofuse_mid",
    },  # they clip by the whole norm
    # They have no hidden channels in a Sequential and do not say which theirs are.
    "prune": {
        *("classify_digits", "diffusion_digits", "resnet50_imagefolder", "saehd_512", "saehd_demo"),
        *("stylegan2_16", "stylegan2_256", "xseg"),
    },
}
"""Which configs say that they cannot do what."""
TINY_EPS = ("{mode: O3, loss_scale: 128}", "fp16-pure")
"""Modes whose weights and states are float16, in which the usual eps of 1e-8 is 0: they refuse it."""
WITHOUT_EPS = ("resnet50_imagefolder", "saehd_512", "saehd_demo", "xseg", "yolofuse_mid")
"""Trained by SGD, and by AdaBelief and RMSprop of leras, which have no such option."""
STEPS = 3
"""After so many every phase has begun and every optimizer has its state; what takes fewer is not planned."""
SLICE = {
    "channels_last": "dcgan_amp",
    "cpu_optimizer": "vae",
    "empty_cache_every": "lsgan",
    "expandable_segments": "dcgan_o1",
    "lora": "wgan_gp",
    "micro_batch": "began",
    "offload_activations": "classify_digits",
    "optimizer_in_backward": "vae",
    "park_optimizer": "dcgan_amp",
    "recompute": "dcgan_fp32",
    "release_grads_after": "wgan_gp",
    "set_to_none": "began",
    "stream_weights": "lsgan",
    "prune": "dcgan_amp",
}
"""The pairs of the default tests: each trick once."""


def modes_of(config: str) -> dict[str, str]:
    """Return the mode in which a config is tried with each trick; no two configs in a row begin alike."""
    turns = islice(cycle(TURNS), list(CONFIGS).index(config), None)
    modes = dict(zip(TRICKS, turns, strict=False))
    dynamic = {HALF: "fp32", CASTS: "bf16"}  # whose overflows are known too late for it
    modes["optimizer_in_backward"] = dynamic.get(
        modes["optimizer_in_backward"], modes["optimizer_in_backward"]
    )
    return modes


def apart(work: Callable[..., dict[str, Any]], *args: Any) -> dict[str, Any]:
    """Return what a function answers in a process forked for it: the card's memory is as at the beginning."""
    answers, told = os.pipe()
    if os.fork() == 0:
        os.close(answers)
        try:
            said = json.dumps(work(*args))
        except BaseException as error:
            said = json.dumps({"wrong": f"{type(error).__name__}: {error}"})
        os.write(told, said.encode())
        os._exit(0)
    os.close(told)
    with os.fdopen(answers) as answer:
        text = answer.read()
    os.wait()
    return json.loads(text) if text else {"wrong": "its process ended without a word"}


def try_settings(config: str, steps: int, *words: str) -> dict[str, Any]:
    """Train and plan a config with further settings; return what is wrong, or why it was refused."""
    planner, run = Planner(), f"run{os.getpid()}"
    batch, small = CONFIGS[config]
    said = attempt(config, batch, steps, run, *small, "precision=null", *words)
    if said.code == 2 and "Traceback" not in said.text:
        return {"refused": said.text.strip().splitlines()[-1]}
    if said.code:
        return {"wrong": str(said)}
    if races := installed().notes.races:
        return {"wrong": f"work that nothing orders: {sorted(set(map(str, races)))}"}
    if steps < STEPS:
        return {}
    memory = json.loads((Path("runs") / run / "summary.json").read_text())["peak_memory"]
    allocated, reserved = planner.peaks(Path("runs") / run)
    figures = {
        "allocated": [allocated, memory["steps_peak_bytes"]],
        "reserved": [reserved, memory["steps_reserved_bytes"]],
    }
    off = {name: planned - measured for name, (planned, measured) in figures.items()}
    if abs(off["allocated"]) > 0.01 * allocated or abs(off["reserved"]) > max(
        0.01 * reserved, 2 * MIB
    ):
        return {"wrong": f"planned and measured bytes: {figures}"}
    return figures


def prepare(folder: Path) -> None:
    """Go to a folder and write the data that some configs want."""
    os.chdir(folder)
    folder_of_images(Path("pictures"))
    folder_of_triplets(Path("triplets"))


def refusals(config: str, found: dict[str, dict[str, Any]]) -> set[str]:
    """Return which settings were refused; fail where any went wrong."""
    print(*(f"{config} {name}: {answer}" for name, answer in found.items()), sep="\n")
    wrong = {name: answer["wrong"] for name, answer in found.items() if "wrong" in answer}
    assert not wrong
    return {name for name, answer in found.items() if "refused" in answer}


def with_trick(config: str, trick: str) -> dict[str, Any]:
    """Train a config with a trick, in the mode whose turn it is, and plan it."""
    words = (f"memory={{{trick}: {TRICKS[trick]}}}", f"precision={modes_of(config)[trick]}")
    return apart(try_settings, config, STEPS, *words)


@pytest.mark.parametrize("trick", SLICE)
def test_a_trick_on_a_shipped_config_takes_what_is_planned(trick: str, tmp_path: Path) -> None:
    prepare(tmp_path)
    found = with_trick(SLICE[trick], trick)
    assert "allocated" in found, found


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("config", CONFIGS)
def test_a_config_with_every_trick_takes_what_is_planned(config: str, tmp_path: Path) -> None:
    prepare(tmp_path)
    refused = refusals(config, {trick: with_trick(config, trick) for trick in TRICKS})
    assert refused == {trick for trick, configs in REFUSED_TRICKS.items() if config in configs}


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.cards("h100")
@pytest.mark.parametrize("config", CONFIGS)
def test_a_config_trains_in_every_mode_or_says_why_not(config: str, tmp_path: Path) -> None:
    prepare(tmp_path)
    found = {}
    for mode in (*MODES, "int8", "fp8"):
        eps = ("optimizer.eps=1e-4",) if mode in TINY_EPS and config not in WITHOUT_EPS else ()
        found[mode] = apart(try_settings, config, 2, f"precision={mode}", *eps)
    # no shipped config has Linear layers that gain by them
    assert refusals(config, found) == {"int8", "fp8"}


@pytest.mark.here
def test_every_trick_has_a_pair_by_default() -> None:
    assert SLICE.keys() == TRICKS.keys()
