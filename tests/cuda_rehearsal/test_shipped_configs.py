"""Every shipped config on a pretend card: it trains, its memory is what was planned, no step makes the host wait.

The run and the plan share the allocator's model and nothing else: one computes, the other traces fake tensors. Where
their peaks differ, one of the two is wrong.
"""

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from mpt.config.finding.shipped import shipped_configs, shipped_presets
from tests.cuda_rehearsal.notes import Note
from tests.cuda_rehearsal.programs import ROOT, Said, mpt
from tests.cuda_rehearsal.torch_cuda import installed

SMALL = {
    "began": 4,
    "classify_digits": 16,
    "dain_demo": 1,
    "dcgan_amp": 4,
    "dcgan_fp32": 8,
    "dcgan_o1": 4,
    "diffusion_digits": 8,
    "lsgan": 8,
    "rife_demo": 1,
    "saehd_demo": 2,
    "stylegan2_16": 4,
    "vae": 8,
    "wgan_gp": 8,
    "yolofuse_demo": 2,
}
"""Configs that a CPU trains in seconds, with the batch that is taken."""
SLOW_IN_HALF = ("dain_demo", "rife_demo", "stylegan2_16", "yolofuse_demo")
"""Where a CPU's half precision takes too long."""
FURTHER = {
    "dain_demo": ("task.flow_steps=1", "dataset.count=8", "dataset.test_count=2"),
    "rife_demo": ("task.flow_steps=1", "dataset.count=8", "dataset.test_count=2"),
    "saehd_demo": ("dataset.count=8", "dataset.test_count=4"),
    "stylegan2_16": ("task.ada_target=0.6",),
    "yolofuse_demo": ("model.image_size=64", "dataset.count=8", "dataset.test_count=4"),
}
"""So that the phase which holds most begins within the few steps, that images are augmented on the device, and that the
evaluation at the end takes no longer than the steps."""
DRAWN = (
    *(
        "began",
        "dcgan_amp",
        "dcgan_fp32",
        "dcgan_o1",
        "diffusion_digits",
        "lsgan",
        "stylegan2_16",
        "stylegan2_256",
    ),
    *("vae", "wgan_gp"),
)
"""Configs whose evaluation at the end draws samples: 64 of them, not 2000, which took nine tenths of the time."""
UNSHIPPED_DATA: dict[str, tuple[int, tuple[str, ...]]] = {
    "resnet50_imagefolder": (
        4,
        ("model.image_size=64", "dataset.augment=[]", "dataset.root=pictures"),
    ),
    "stylegan2_256": (
        4,
        ("model.image_size=32", "model.channel_base=256", "dataset.root=pictures"),
    ),
    "yolofuse_mid": (
        2,
        (
            "model.image_size=64",
            "dataset=null",
            "dataset={name: rgb_ir_scenes, count: 8, test_count: 4}",
        ),
    ),
    "xseg": (
        2,
        (
            "model.image_size=64",
            "model.width=4",
            "dataset=null",
            "dataset={name: procedural_masks, count: 4, test_count: 2}",
        ),
    ),
    "dain_vimeo": (
        1,
        (
            "model.size=small",
            "optimizer.parts={}",
            "dataset.root=triplets",
            "dataset.crop=[64, 64]",
        ),
    ),
}
"""Configs of data that is not shipped, with a batch and what makes them small enough for a CPU."""
PRESETS = tuple(name for name in shipped_presets() if name.rpartition("_")[0] in UNSHIPPED_DATA)
"""Recipes by card; those of `LARGE` take a CPU too long."""
LARGE = {"saehd_512": 1}
WITH_AN_EXTRA = ("flux_lora", "sd15_lora", "sd3_lora", "sdxl_lora")
"""Configs of another library's networks, which the tests do without."""
SHIPPED = {*SMALL, *UNSHIPPED_DATA, *LARGE, *WITH_AN_EXTRA}
SHRUNK = ("image_size=64", "ae_dims=32", "e_dims=16", "d_dims=16", "d_mask_dims=8")
DRAWN_FACES = ("dataset=null", "dataset={name: procedural_faces, count: 2, test_count: 2}")
"""In place of faces that are not shipped."""
ONCE_PER_UPDATE = ("LossWatch.saw_finite", "Questions.ask")
"""What decides whether an update is taken: whether its loss, or its gradients, are finite. For one of the two the host
may wait, once."""
STEPS = 5
QUIET = (
    "train.log_every=1000",
    "train.checkpoint_every=0",
    "train.sample_every=0",
    "train.evaluate_every=0",
)


def train(config: str, batch: int, steps: int, name: str, *words: str) -> Path:
    """Train a shipped config for some steps without side jobs until the end; return its folder."""
    said = attempt(config, batch, steps, name, *words)
    assert said.code == 0, said
    return Path("runs") / name


def attempt(config: str, batch: int, steps: int, name: str, *words: str) -> Said:
    """Train a shipped config for some steps without side jobs until the end, in runs/NAME, if it is not refused."""
    short = (f"train.steps={steps}", "train.epochs=null", f"train.batch_size={batch}", *QUIET)
    drawn = ("task.metric_samples=64",) if config in DRAWN else ()
    planned = (
        "train.plan_memory=false",
        f"name={name}",
        "--runs",
        "runs",
        "--quiet",
        "--device",
        "cuda",
    )
    path = f"@{config}" if config in SHIPPED else config
    return mpt("train", path, *short, *drawn, *planned, *words)


class Planner:
    """A process that plans, forked before the card is used: planners do not see the machine's GPUs."""

    def __init__(self) -> None:
        asked, self.wishes = os.pipe()
        self.answers, told = os.pipe()
        if os.fork() == 0:
            os.close(self.wishes)
            try:
                with os.fdopen(asked) as words, os.fdopen(told, "w") as answer:
                    wish = words.read()
                    answer.write(json.dumps(plan_without_cards(json.loads(wish))) if wish else "")
            finally:
                os._exit(0)  # whatever happened: the test's outcome is not this process's to write
        os.close(asked)
        os.close(told)

    def peaks(self, run: Path) -> tuple[int, int]:
        """Plan a run's own config for its card; return the allocated and the reserved peak in bytes."""
        import torch

        from mpt.config.load import load_config
        from mpt.planner.server.beside import request
        from mpt.seams import DataSpec

        config = load_config(run / "config.yaml")
        data = DataSpec.from_record(json.loads((run / "data.json").read_text()))
        with os.fdopen(self.wishes, "w") as words:
            words.write(
                json.dumps(request(config, data, torch.device("cuda", 0), run / "plan.json"))
            )
        with os.fdopen(self.answers) as answer:
            plan = json.loads(answer.read())
        return plan["peak_bytes"], plan["reserved_bytes"]


def plan_without_cards(wish: dict[str, Any]) -> dict[str, Any]:
    """Plan in a process that sees no card."""
    import torch

    from mpt.planner.server.beside import predict

    torch._C._cuda_getDeviceCount = lambda: 0  # type: ignore[attr-defined]
    return predict(wish)


def notes_of_steps(config: str, batch: int, *words: str) -> list[Note]:
    """Train for five steps; return what is to be known of all but the first, which makes what is made once.

    What the end of a run does, after the last step, is not among them.
    """
    record = installed().notes
    with record.counting(), record.listen("wait", "float64") as found:
        train(config, batch, STEPS, "run", *words)
    assert record.steps == STEPS
    return [note for note in found if (note.step > 1 if note.in_step else 1 <= note.step < STEPS)]


def waits_of_steps(config: str, batch: int, *words: str) -> dict[str, int]:
    """Return the lines at which steps make the host wait, but for the one question per update, and how often."""
    return unasked(notes_of_steps(config, batch, *words))


def unasked(found: list[Note]) -> dict[str, int]:
    """Count the lines of waits; of what may be asked once per update, what is asked again."""
    asked: set[int] = set()
    again: Counter[str] = Counter()
    for note in found:
        if note.kind != "wait":
            continue
        if note.function.startswith(ONCE_PER_UPDATE) and note.update and note.update not in asked:
            asked.add(note.update)
        else:
            again[f"{note} in {note.function}"] += 1
    return dict(again)


def check(config: str, batch: int, *words: str, waits: bool = True) -> None:
    """Train a config: steps neither make the host wait, if that is asked, nor take float64; memory is as planned."""
    planner = Planner()
    found = notes_of_steps(config, batch, *words)
    wide = {
        f"{note} in {note.function}" for note in found if note.kind == "float64" and note.in_step
    }
    assert not wide, f"these lines take float64 in the steps: {wide}"
    if waits:
        wrong = unasked(found)
        assert not wrong, f"these lines make the host wait in the steps: {wrong}"
    run = Path("runs/run")
    memory = json.loads((run / "summary.json").read_text())["peak_memory"]
    allocated, reserved = planner.peaks(run)
    print(f"{config}: planned {allocated}, {reserved}; measured {memory}")
    assert memory["steps_peak_bytes"] == pytest.approx(allocated, rel=0.01)
    # The sums by which a logged step compares its weights are not planned: a kilobyte, and a small segment or none.
    assert memory["steps_reserved_bytes"] == pytest.approx(reserved, rel=0.01, abs=2**21)


@pytest.mark.parametrize("config", SMALL)
def test_a_config_trains_as_planned_and_without_waiting(config: str, tmp_path: Path) -> None:
    os.chdir(tmp_path)
    check(
        config,
        SMALL[config],
        *FURTHER.get(config, ()),
        *(["precision=fp32"] if config in SLOW_IN_HALF else []),
    )


def check_others(config: str, *words: str) -> None:
    """Check a config of data that is not shipped, made smaller and with drawn data, in the current folder."""
    from tests.test_configs import folder_of_images, folder_of_triplets

    folder_of_images(Path("pictures"))
    folder_of_triplets(Path("triplets"))
    batch, small = UNSHIPPED_DATA[config]
    check(config, batch, "precision=fp32", "dataset.workers=0", *small, *words, waits=False)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("config", UNSHIPPED_DATA)
def test_a_config_of_others_data_needs_the_memory_that_is_planned(
    config: str, tmp_path: Path
) -> None:
    os.chdir(tmp_path)
    check_others(config)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_needs_the_memory_that_is_planned(preset: str, tmp_path: Path) -> None:
    os.chdir(tmp_path)
    check_others(preset.rpartition("_")[0], "--with", f"@{preset}")


def test_what_an_evaluation_takes_is_not_the_steps(tmp_path: Path) -> None:
    """A GAN of convolutions multiplies no matrices; the classifier of its figures takes a workspace."""
    os.chdir(tmp_path)
    check("dcgan_fp32", 8, "train.evaluate_every=1", waits=False)


def test_weights_that_travel_take_what_was_planned(tmp_path: Path) -> None:
    os.chdir(tmp_path)
    check("vae", 8, "memory={stream_weights: {min_kibibytes: 0}}", waits=False)


def test_activations_that_travel_take_what_was_planned(tmp_path: Path) -> None:
    """On their way back they lie in the computing stream's memory: a pool of their own came to more than planned."""
    os.chdir(tmp_path)
    check("dcgan_fp32", 32, "memory={offload_activations: 0.02}", "model.features=32")


def test_growing_segments_reserve_what_was_planned(tmp_path: Path) -> None:
    """From the first weight on: `mpt train` tells the allocator in the environment before torch is imported."""
    os.chdir(tmp_path)
    check("dcgan_fp32", 8, "memory={expandable_segments: true}", waits=False)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("config", SLOW_IN_HALF)
def test_a_config_in_its_own_precision(config: str, tmp_path: Path) -> None:
    os.chdir(tmp_path)
    check(config, SMALL[config], *FURTHER.get(config, ()))


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("config", LARGE)
@pytest.mark.cards("h100")
def test_a_large_config_needs_the_memory_that_is_planned(config: str, tmp_path: Path) -> None:
    os.chdir(tmp_path)
    check(config, LARGE[config], "precision=null", "precision=fp32", *DRAWN_FACES, waits=False)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.cards("rtx2060")
def test_the_recipe_of_a_small_card_fits_it(tmp_path: Path) -> None:
    """SAEHD at 512 pixels in full size on 6 GiB. Of the batch two samples: each is a micro-batch of its own."""
    os.chdir(tmp_path)
    scale = "precision.init_scale=1024"  # no overflow in the first step
    check("saehd_512", 2, "--with", "@saehd_512_6gb", scale, *DRAWN_FACES, waits=False)


def table() -> list[str]:
    """Return which configs are rehearsed, in which precision and in which tests, as Markdown."""
    own, every = "its own precision", "every mode, every trick"
    rows = dict.fromkeys(SMALL, (own, every))
    rows |= dict.fromkeys(SLOW_IN_HALF, ("fp32", f"{own}; {every}"))
    rows |= dict.fromkeys(UNSHIPPED_DATA, ("none", f"made smaller, with drawn data: fp32, {every}"))
    rows |= dict.fromkeys(
        LARGE,
        ("none", f"fp32 on an H100, its recipe for 6 GB on an RTX 2060; made smaller: {every}"),
    )
    rows |= dict.fromkeys(WITH_AN_EXTRA, ("none", "none: they need diffusers"))
    lines = [f"| `{name}` | {default} | {slow} |" for name, (default, slow) in sorted(rows.items())]
    return ["| Config | Default tests | Slow tests |", "|---|---|---|", *lines]


@pytest.mark.here
def test_the_page_lists_what_is_rehearsed_where() -> None:
    assert "\n".join(table()) in (ROOT / "docs" / "explanation" / "rehearsal.md").read_text("utf-8")


@pytest.mark.here
def test_every_shipped_config_is_rehearsed() -> None:
    shipped = {*shipped_configs()}
    shipped.remove("reference")  # classify_digits with every setting as a comment
    assert shipped <= SHIPPED, "add the new config, with a batch that a CPU can take"
