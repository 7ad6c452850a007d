"""What a run takes of a card beside its steps: an evaluation without the optimizer's state, and a resume."""

from pathlib import Path

import pytest
import torch

from mpt import accelerator
from mpt.config.load import load_config
from mpt.planner.client.session import Session
from mpt.planner.facts.calibration import Calibration
from mpt.planner.facts.gpus import find_gpu
from mpt.run.checkpoints.checkpoint import load
from mpt.tasks.classify import Classify
from tests.cuda_rehearsal.programs import CLASSIFIER, train

ADAM = CLASSIFIER.replace("features: 4", "features: 64").replace(
    "{name: sgd, lr: 0.05}", "{name: adamw}"
)


@pytest.mark.slow
def test_an_evaluation_runs_without_the_state_that_is_parked_and_no_bit_changes(
    tmp_path: Path,
) -> None:
    held: list[int] = []
    evaluate = Classify.evaluate_batch

    def watched(self: Classify, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        held.append(torch.cuda.memory_allocated())
        return evaluate(self, batch)

    Classify.evaluate_batch = watched  # type: ignore[method-assign]
    states = []
    for name, memory in (("plain", "{}"), ("parked", "{park_optimizer: true}")):
        said = train(
            tmp_path,
            ADAM,
            f"name={name}",
            f"memory={memory}",
            "train.evaluate_every=2",
            "train.steps=3",
        )
        assert said.code == 0, said
        said = train(
            tmp_path,
            ADAM,
            f"name={name}",
            f"memory={memory}",
            "train.evaluate_every=2",
            "--resume",
            "auto",
        )
        assert said.code == 0, said
        states.append(load(tmp_path / "runs" / name).state)
    averages = [
        value
        for own in states[0]["optimizers"]["net"]["state"].values()
        for key, value in own.items()
        if key in ("exp_avg", "exp_avg_sq")
    ]
    on_card = sum(-(-value.nbytes // 512) * 512 for value in averages)
    first_plain, first_parked = held[0], held[len(held) // 2]
    assert first_plain - first_parked == on_card > 0
    for kind in ("modules", "optimizers"):
        for one, other in zip(tensors(states[0][kind]), tensors(states[1][kind]), strict=True):
            assert torch.equal(one, other)


def tensors(value: object) -> list[torch.Tensor]:
    from mpt.run.process.storage_trace import tensors_in

    return list(tensors_in(value))


def test_a_resume_takes_what_was_planned_for_it(tmp_path: Path) -> None:
    measured: list[int] = []
    reset = accelerator.reset_peaks

    def noting(device: torch.device) -> None:
        measured.append(accelerator.peaks(device)[0])
        reset(device)

    accelerator.reset_peaks = noting
    assert train(tmp_path, ADAM, "train.steps=2").code == 0
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    measured.clear()
    before = torch.cuda.memory_allocated()
    assert train(tmp_path, ADAM, "--resume", "runs/run").code == 0
    with Session(find_gpu("rtx3060"), Calibration()) as session:
        plan = session.plan([load_config(tmp_path / "config.yaml")], whole_run=True)[0].get()
    assert measured[0] - before == plan.moments["resume"].allocated
