"""Faults that would have failed on the first GPU, each found on a pretend device and mended: none comes back."""

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from mpt.seams import Phase
from tests.cuda_rehearsal.programs import CLASSIFIER, GAN, mpt, rows, train
from tests.cuda_rehearsal.torch_cuda import installed

NO_MEMORY = (
    "CUDA error: out of memory",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
)
NO_ENGINE = "GET was unable to find an engine to execute this computation"


def weights(run: Path, step: int) -> dict[str, bytes]:
    """Return a checkpoint's files, but for the manifest, which holds the time."""
    folder = run / "checkpoints" / f"step-{step:08}"
    return {
        path.name: path.read_bytes()
        for path in sorted(folder.iterdir())
        if path.suffix == ".safetensors"
    }


def test_a_resume_restores_the_devices_random_state(tmp_path: Path) -> None:
    assert train(tmp_path, GAN, "name=whole").code == 0
    assert train(tmp_path, GAN, "name=parts", "train.steps=2").code == 0
    said = train(tmp_path, GAN, "name=parts", "--resume", "runs/parts")
    assert said.code == 0, said
    assert (
        rows(tmp_path / "runs/whole")[-1]["step"] == rows(tmp_path / "runs/parts")[-1]["step"] == 4
    )
    whole, parts = weights(tmp_path / "runs/whole", 4), weights(tmp_path / "runs/parts", 4)
    assert whole
    assert whole == parts


def test_a_rollback_restores_the_devices_random_state(tmp_path: Path) -> None:
    config = CLASSIFIER.replace("plan_memory: false", "plan_memory: false, on_non_finite: rollback")
    with NonFinite(5, 5):
        said = train(tmp_path, config, "train.steps=6")
    assert said.code == 0, said
    assert "rollback" in {row["kind"] for row in rows(tmp_path / "runs/run", "events.jsonl")}


class NonFinite:
    """Makes losses of the classifier NaN, from one call to another."""

    def __init__(self, first: int, last: int) -> None:
        self.calls, self.first, self.last = 0, first, last

    def __enter__(self) -> None:
        self.original = torch.nn.functional.cross_entropy

        def cross_entropy(*args: object, **kwargs: object) -> torch.Tensor:
            self.calls += 1
            loss = self.original(*args, **kwargs)  # type: ignore[arg-type]
            if not self.first <= self.calls <= self.last:
                return loss
            unwritten = torch.empty_like(loss)  # NaN already, and no fault
            return loss * float("nan") + unwritten.zero_()

        torch.nn.functional.cross_entropy = cross_entropy

    def __exit__(self, *error: object) -> None:
        torch.nn.functional.cross_entropy = self.original


def test_bfloat16_weights_train_under_a_static_scale(tmp_path: Path) -> None:
    said = train(
        tmp_path,
        CLASSIFIER.replace("precision: fp32", "precision: {mode: bf16-pure, loss_scale: 128}"),
    )
    assert said.code == 0, said


@pytest.mark.parametrize("words", NO_MEMORY)
def test_a_refusal_of_memory_by_driver_or_library_is_adapted_to(tmp_path: Path, words: str) -> None:
    installed().fail_once("aten::convolution_backward", words, calls_before=5, out_of_memory=False)
    said = train(tmp_path, CLASSIFIER, "memory.on_oom=adapt")
    assert said.code == 0, said
    assert "micro-batch 32 -> 16" in said.text


@pytest.mark.parametrize(("left_gib", "adapts"), [(0.5, True), (8, False)])
def test_cudnn_without_an_engine_is_out_of_memory_only_on_a_card_that_is_nearly_full(
    tmp_path: Path, left_gib: float, adapts: bool
) -> None:
    (card,) = installed().memory.cards
    card.others_bytes = card.capacity_bytes - int(left_gib * 2**30)
    installed().fail_once(
        "aten::convolution_backward", NO_ENGINE, calls_before=5, out_of_memory=False
    )
    said = train(tmp_path, CLASSIFIER, "memory.on_oom=adapt")
    assert ("micro-batch 32 -> 16" in said.text) is adapts, said
    assert (said.code == 0) is adapts, said
    if not adapts:
        assert "Traceback" not in said.text
        assert "cuDNN has no kernel" in said.text


ASSERTING_DATA = """
import torch
from mpt.config.options import DatasetOptions
from mpt.seams import Dataset, DataSpec, FieldSpec

class Settings(DatasetOptions):
    pass

class Numbers(Dataset):
    spec = DataSpec({"image": FieldSpec((1, 8, 8), torch.float32, "image"), "label": FieldSpec((), torch.int64)}, 64,
                    tuple("abcd"))
    def __len__(self):
        return 64
    def fetch(self, indices, epoch):
        label = torch.tensor([7 if i >= 40 and epoch else i % 4 for i in indices])
        return {"image": torch.rand(len(indices), 1, 8, 8), "label": label}

def build(settings, split, seed):
    return Numbers()
"""


def test_a_device_side_assert_names_the_sample(tmp_path: Path) -> None:
    """Labels are looked at in the first epoch; these become wrong in the second."""
    (tmp_path / "parts" / "data").mkdir(parents=True)
    (tmp_path / "parts" / "data" / "numbers.py").write_text(ASSERTING_DATA)
    installed().fail_once(
        "aten::nll_loss_forward",
        "CUDA error: device-side assert triggered",
        calls_before=2,
        out_of_memory=False,
    )
    said = train(
        tmp_path, CLASSIFIER.replace("dataset: digits", "dataset: numbers"), "--parts", "parts"
    )
    assert said.code == 3, said
    assert "Traceback" not in said.text
    assert "device-side assert at step 2" in said.text
    assert re.search(r"It is sample (4|5|6)\d: Target 7 is out of bounds", said.text), said


def test_an_update_that_ran_out_of_memory_returns_pinned_blocks_too(tmp_path: Path) -> None:
    emptied: list[bool] = []
    torch._C._host_emptyCache = lambda: emptied.append(True)
    installed().fail_once("aten::convolution_backward", calls_before=5)
    said = train(tmp_path, CLASSIFIER, "memory.on_oom=adapt")
    assert said.code == 0, said
    assert emptied == [True]


def test_a_refusal_of_memory_that_is_not_adapted_to_is_no_traceback(tmp_path: Path) -> None:
    """Without the plans of its report, which has tests of its own (test_out_of_memory_report.py)."""
    import mpt.workflows.training.out_of_memory_report

    mpt.workflows.training.out_of_memory_report.add_report = lambda message, training, arguments: (
        message
    )
    installed().fail_once("aten::convolution", NO_MEMORY[1], calls_before=5, out_of_memory=False)
    said = train(tmp_path, CLASSIFIER, "memory.on_oom=stop")
    assert said.code == 7, said
    assert "Traceback" not in said.text


def test_a_card_that_is_not_there_is_refused_in_words(tmp_path: Path) -> None:
    said = train(tmp_path, CLASSIFIER, "--device", "cuda:9")
    assert said.code == 2
    assert "torch sees 1 CUDA device(s)" in said.text


@pytest.mark.cards("rtx3060", "rtx3060")
def test_a_run_on_the_second_card_opens_no_context_on_the_first(tmp_path: Path) -> None:
    said = train(tmp_path, GAN, "--device", "cuda:1", "precision=amp")
    assert said.code == 0, said
    assert installed().contexts() == [1]


@pytest.mark.cards("rtx3060", "rtx4090")
def test_an_exact_resume_takes_no_other_card(tmp_path: Path) -> None:
    assert train(tmp_path, CLASSIFIER, "train.steps=2").code == 0
    said = train(tmp_path, CLASSIFIER, "--resume", "runs/run", "--exact", "--device", "cuda:1")
    assert said.code == 4, said
    assert "RTX 4090" in said.text
    assert (
        train(tmp_path, CLASSIFIER, "--resume", "runs/run", "--exact", "--device", "cuda:0").code
        == 0
    )


@pytest.mark.parametrize("replacing", ["cpu_optimizer: {}", "low_bit_optimizer: {}"])
def test_gradients_are_released_where_another_trick_replaces_the_optimizers(
    tmp_path: Path, replacing: str
) -> None:
    from mpt.memory import low_bit_optimizer
    from mpt.memory.release_grads_after import ReleaseGradients

    calls = []
    step = ReleaseGradients.step

    @contextlib.contextmanager
    def noted(self: ReleaseGradients, phase: Phase) -> Iterator[None]:
        with step(self, phase):
            yield
        assert phase.optimizer in self.released
        assert all(
            p.grad is None for group in phase.optimizer.param_groups for p in group["params"]
        )
        calls.append(phase.name)

    low_bit_optimizer.choose_backend = lambda wanted: "torchao"
    low_bit_optimizer.make_low_bit = lambda optimizer, backend: torch.optim.Adam(
        optimizer.param_groups
    )
    ReleaseGradients.step = noted  # type: ignore[method-assign]
    said = train(
        tmp_path, GAN, f"memory={{release_grads_after: true, {replacing}}}", "train.steps=1"
    )
    assert said.code == 0, said
    assert calls == ["disc", "gen"]


def test_half_inference_counts_its_own_weights_alone(tmp_path: Path) -> None:
    wide = CLASSIFIER.replace("features: 4", "features: 128")
    assert train(tmp_path, wide, "train.steps=1").code == 0
    said = mpt("infer", "runs/run", "--half")
    assert said.code == 0, said
    row = next(line for line in said.text.splitlines() if "peak memory" in line)
    ratio = float(re.findall(r"([\d.]+)×|([\d.]+)x", row)[0][0])
    assert ratio < 0.75, row  # weights and activations in half, without the float32 run's


def test_half_inference_on_a_cpu_touches_no_gpu(tmp_path: Path) -> None:
    assert train(tmp_path, CLASSIFIER, "train.steps=1", "--device", "cpu").code == 0
    said = mpt("infer", "runs/run", "--half", "--device", "cpu")
    assert said.code == 0, said
    assert installed().contexts() == []


def test_a_comparison_compares_the_steps_memory_and_not_the_evaluations(tmp_path: Path) -> None:
    for name in ("one", "other"):
        assert train(tmp_path, GAN, f"name={name}", "train.steps=1", "train.batch_size=2").code == 0
    memory = json.loads((tmp_path / "runs/one/summary.json").read_text())["peak_memory"]
    assert memory["peak_bytes"] > memory["steps_peak_bytes"]
    said = mpt("compare", "runs/one", "runs/other")
    assert said.code == 0, said
    (found,) = (tmp_path / "runs").glob("compare-*/comparison.json")
    assert f'"peak_bytes": {memory["steps_peak_bytes"]}' in found.read_text()


def test_the_first_nan_is_not_looked_for_in_memory_that_was_not_written(tmp_path: Path) -> None:
    with NonFinite(3, 99):
        said = train(tmp_path, CLASSIFIER, "train.on_non_finite=stop")
    assert said.code == 6, said
    assert "aten::mul" in said.text
    assert "empty" not in said.text
