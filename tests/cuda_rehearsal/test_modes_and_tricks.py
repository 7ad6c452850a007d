"""Every precision mode and every memory trick on a pretend card, and what a card must be refused."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.cuda_rehearsal.programs import CLASSIFIER, GAN, MODES, train
from tests.cuda_rehearsal.torch_cuda import installed

TRICKS = (
    "optimizer_in_backward: true",
    "release_grads_after: true",
    "expandable_segments: true, empty_cache_every: 2",
    "offload_activations: 0.0",
    "recompute: sqrt",
    "cpu_optimizer: true",
    "stream_weights: {min_kibibytes: 0}",
    "lora: {rank: 2, full: []}, low_bit_base: {format: nf4, keep: []}",
    "channels_last: true",
    "micro_batch: 8",
)


@pytest.mark.parametrize("mode", MODES)
def test_a_mode_trains_resumes_and_infers(mode: str, tmp_path: Path) -> None:
    optimizer = "optimizer.lr=0.01"
    with installed().notes.listen("float32", "tf32") as products:
        said = train(tmp_path, CLASSIFIER, f"precision={mode}", "--smoke", "2", optimizer)
    assert said.code == 0, said
    if mode in ("fp32", "tf32"):
        expected = "float32" if mode == "fp32" else "tf32"
        assert {product.kind for product in products} == {expected}


def test_losses_are_computed_in_float32_on_the_card() -> None:
    """Autocast and O1 are switched off by the kind of device: a guard of the CPU's leaves the card in half."""
    from mpt.config.load import load_config
    from mpt.engine.building.build import build_run
    from mpt.engine.step.step import update
    from mpt.tasks import classify
    from tests.engine.parts import DIGITS, batch

    seen: list[tuple[torch.dtype, torch.dtype]] = []

    def measured(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        seen.append((logits.dtype, (logits @ logits.t()).dtype))
        return torch.nn.functional.cross_entropy(logits, labels)

    classify.find_loss = lambda *settings: measured
    card, model = torch.device("cuda", 0), {"name": "small_cnn", "features": 4}
    on_card = {name: value.to(card) for name, value in batch().items()}
    for mode in (*MODES, "{mode: amp, losses: inherit}"):
        run = build_run(
            load_config(
                {"model": model, "dataset": "digits", "optimizer": "sgd"}, [f"precision={mode}"]
            ),
            card,
            DIGITS,
        )
        update(run, run.phases[0], on_card)
    *guarded, inherited = seen
    assert guarded == [(torch.float32, torch.float32)] * len(MODES)
    assert inherited == (torch.float16, torch.float16)


@pytest.mark.parametrize(
    ("optimizer", "mode"),
    [("lion", "bf16-sr"), ("muon", "amp"), ("adafactor", "bf16-sr"), ("schedule_free", "amp")],
)
def test_an_optimizer_trains_and_resumes(optimizer: str, mode: str, tmp_path: Path) -> None:
    said = train(
        tmp_path,
        CLASSIFIER,
        f"precision={mode}",
        "--smoke",
        "2",
        "optimizer=null",
        f"optimizer={optimizer}",
    )
    assert said.code == 0, said


@pytest.mark.parametrize("trick", TRICKS)
@pytest.mark.parametrize(
    "config", [CLASSIFIER, pytest.param(GAN, marks=pytest.mark.slow)], ids=["classifier", "gan"]
)
def test_a_trick_trains(trick: str, config: str, tmp_path: Path) -> None:
    """In the order of its streams too: races fail every test here."""
    said = train(
        tmp_path,
        config,
        f"memory={{{trick}}}",
        "train.steps=2",
        "train.batch_size=16",
        "precision=bf16",
    )
    nothing_to_do = "recompute" in trick or "no Linear layer matches" in said.text
    if nothing_to_do and said.code == 2:
        pytest.skip(said.text)
    assert said.code == 0, said


def test_weights_under_way_that_nobody_waited_for_are_freed_behind_the_copying() -> None:
    """A forward that ends early sends for the next block's weights, whose copies are dropped, or out of date."""
    from mpt.memory.stream_weights import Settings, StreamWeights

    def streamed() -> nn.Sequential:
        network = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8)) for _ in range(3)))
        settings = Settings(min_kibibytes=0)
        StreamWeights(settings).host({"network": network}, torch.device("cuda", 0))
        network(inputs)  # in what order blocks come is known from then on
        network[0](inputs)
        return network

    inputs = torch.ones(2, 8, device="cuda")
    with torch.no_grad():
        streamed()
        network = streamed()
        weight = network[1][0].weight
        weight.data = weight.data.clone()
        network[1](inputs)
        torch.cuda.synchronize()


def test_images_stay_channels_last_behind_the_first_weights_that_are(tmp_path: Path) -> None:
    """A layer of a single channel has no order: the second of the discriminator transposes once for each forward."""
    from mpt.nn.dcgan import Discriminator

    forward: Any = Discriminator.forward
    forwards: list[int] = []

    def counted(*args: Any) -> Any:
        forwards.append(1)
        return forward(*args)

    Discriminator.forward = counted  # type: ignore[method-assign]
    with installed().notes.listen("layout") as found:
        said = train(
            tmp_path, GAN, "memory={channels_last: true}", "train.steps=2", "train.log_every=9"
        )
    assert said.code == 0, said
    assert len(found) == len(forwards) > 0, {f"{note} in {note.function}" for note in found}


@pytest.mark.slow
@pytest.mark.parametrize("trick", TRICKS)
@pytest.mark.parametrize("mode", ["amp", "O1", "O2"])
@pytest.mark.parametrize("config", [CLASSIFIER, GAN], ids=["classifier", "gan"])
def test_a_trick_trains_in_a_mode(mode: str, trick: str, config: str, tmp_path: Path) -> None:
    words = (f"memory={{{trick}}}", "train.steps=2", "train.batch_size=8", f"precision={mode}")
    said = train(tmp_path, config, *words)
    assert said.code in (0, 2), said  # 2: some do not go together, and say so
    assert "Traceback" not in said.text


@pytest.mark.cards("rtx2060")
@pytest.mark.parametrize("mode", ["tf32", "bf16", "bf16-pure"])
def test_a_turing_card_is_refused_what_it_does_not_have(mode: str, tmp_path: Path) -> None:
    said = train(tmp_path, CLASSIFIER, f"precision={mode}", "train.steps=1")
    assert said.code == 2, said
    assert "RTX 2060" in said.text
    assert "compute capability 7.5" in said.text


@pytest.mark.cards("rtx3060")
def test_fp8_is_refused_below_its_capability(tmp_path: Path) -> None:
    said = train(tmp_path, CLASSIFIER, "precision=fp8", "train.steps=1")
    assert said.code == 2, said
    assert "8.9" in said.text
    assert "8.6" in said.text


@pytest.mark.cards("gtx1660")
def test_a_gtx_1660_whose_half_gives_nan_stops_in_words(tmp_path: Path) -> None:
    said = train(tmp_path, CLASSIFIER, "precision={mode: amp, init_scale: 4}", "train.steps=8")
    assert said.code == 6, said
    assert "precision=fp32" in said.text
    assert train(tmp_path, CLASSIFIER, "train.steps=1").code == 0


def test_settings_that_torch_reads_from_the_environment_do_not_stay(tmp_path: Path) -> None:
    before = dict(os.environ)
    assert train(tmp_path, CLASSIFIER, "train.steps=1").code == 0
    changed = {name for name in {*before, *os.environ} if before.get(name) != os.environ.get(name)}
    assert changed <= {"CUBLAS_WORKSPACE_CONFIG"}
