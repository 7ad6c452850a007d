"""Another kind of accelerator than CUDA: an Intel Arc of the first generation, which computes nothing in float64.

Torch's own code for XPU runs: its autocast rules, autograd, streams, statistics and random states. That nothing in mpt
refuses the kind by name, or asks `torch.cuda` instead, is what these tests are for; Intel's kernels are not here.
"""

import json
from pathlib import Path

import pytest
import torch

from mpt.engine.building.devices import choose_device
from mpt.errors import ConfigError
from tests.cuda_rehearsal.programs import CLASSIFIER, GAN, mpt, rows, train
from tests.cuda_rehearsal.torch_cuda import installed

pytestmark = pytest.mark.cards("arc_a770")
INTEL_CLASSIFIER = CLASSIFIER.replace("device: cuda", "device: xpu")
INTEL_GAN = GAN.replace("device: cuda", "device: auto")


def weights_of(run: Path) -> dict[str, torch.Tensor]:
    from mpt.run.checkpoints.checkpoint import load

    modules = load(run).state["modules"]
    return {f"{name}.{key}": value for name, own in modules.items() for key, value in own.items()}


def test_auto_takes_the_accelerator_that_torch_has() -> None:
    assert choose_device("auto").type == "xpu"
    assert choose_device("xpu:0") == torch.device("xpu:0")


def test_a_kind_that_torch_does_not_have_is_refused_with_the_one_that_it_has() -> None:
    with pytest.raises(ConfigError, match="sees no CUDA device; torch's accelerator here is xpu"):
        choose_device("cuda")
    with pytest.raises(ConfigError, match=r"sees 1 xpu device\(s\), from xpu:0"):
        choose_device("xpu:1")


@pytest.mark.parametrize("mode", ["fp32", "amp", "O1", "O2", "bf16-sr"])
def test_a_classifier_trains_and_evaluates(mode: str, tmp_path: Path) -> None:
    said = train(tmp_path, INTEL_CLASSIFIER, f"precision={mode}", "train.evaluate_every=2")
    assert said.code == 0, said
    summary = json.loads((tmp_path / "runs/run/summary.json").read_text())
    assert summary["steps"] == 4
    assert summary["peak_memory"]["kind"] == "xpu"
    assert summary["peak_memory"]["steps_peak_bytes"] > 0
    assert summary["peak_memory"]["device"] == "Intel(R) Arc(TM) A770 Graphics"


def test_a_resumed_gan_has_the_weights_of_one_never_stopped(tmp_path: Path) -> None:
    """Its latents are drawn on the device, whose random numbers a checkpoint must keep."""
    assert train(tmp_path, INTEL_GAN, "precision=amp", "name=whole").code == 0
    assert train(tmp_path, INTEL_GAN, "precision=amp", "name=parts", "train.steps=2").code == 0
    assert (
        train(
            tmp_path, INTEL_GAN, "precision=amp", "name=parts", "--resume", "runs/parts", "--exact"
        ).code
        == 0
    )
    whole, parts = weights_of(tmp_path / "runs/whole"), weights_of(tmp_path / "runs/parts")
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


@pytest.mark.parametrize(
    "trick",
    [
        "offload_activations={min_mebibytes: 0}",
        "stream_weights={min_kibibytes: 0}",
        "cpu_optimizer=true",
    ],
)
def test_tricks_copy_on_streams_of_their_own(trick: str, tmp_path: Path) -> None:
    assert train(tmp_path, INTEL_CLASSIFIER, "name=plain").code == 0
    installed().extension.reset_counts()
    said = train(tmp_path, INTEL_CLASSIFIER, f"memory.{trick}", "name=tricked")
    assert said.code == 0, said
    # one brings the batches
    assert installed().extension.count_of("stream") >= (1 if trick.startswith("cpu") else 2)
    plain, tricked = weights_of(tmp_path / "runs/plain"), weights_of(tmp_path / "runs/tricked")
    assert all(torch.equal(plain[name], tricked[name]) for name in plain)


def test_memory_that_runs_out_is_adapted_to(tmp_path: Path) -> None:
    installed().fail_once("aten::convolution_backward", calls_before=7)
    said = train(tmp_path, INTEL_CLASSIFIER, "memory.on_oom=adapt")
    assert said.code == 0, said
    assert "out of memory; micro-batch 32 -> 16" in said.text


def test_a_ceiling_limits_the_allocator(tmp_path: Path) -> None:
    said = train(tmp_path, INTEL_CLASSIFIER, "memory.ceiling=1GiB")
    assert said.code == 0, said
    assert "tensors may take 1,024 MiB of the 16.0 GiB on xpu: memory.ceiling=1GiB" in " ".join(
        said.text.split()
    )
    assert installed().memory.cards[0].fraction == pytest.approx(1 / 16)


def test_the_doctor_computes_on_it_and_the_run_is_reported(tmp_path: Path) -> None:
    assert train(tmp_path, INTEL_CLASSIFIER).code == 0
    said = mpt("doctor", "--only", "environment")
    assert said.code == 0, said
    assert "xpu:0: Intel(R) Arc(TM) A770 Graphics" in " ".join(said.text.split())
    assert "float16 convolutions and products are right" in " ".join(said.text.split())
    (device,) = json.loads((tmp_path / "runs/run/env.json").read_text())["devices"]
    assert device == {"name": "Intel(R) Arc(TM) A770 Graphics", "memory_bytes": 16 * 2**30}
    assert all(
        row["memory"]["kind"] == "xpu" for row in rows(tmp_path / "runs/run") if "memory" in row
    )


def test_inference_and_half_precision_run_on_it(tmp_path: Path) -> None:
    assert train(tmp_path, INTEL_CLASSIFIER).code == 0
    said = mpt("infer", "runs/run", "--half", "--device", "xpu")
    assert said.code == 0, said
    assert "float16 on xpu" in said.text
