"""Which card a rank works on, and what ranks send over NCCL, which takes tensors on the card alone."""

from types import SimpleNamespace

import pytest
import torch

from mpt.config.load import load_config
from mpt.engine.building.build import build_run
from mpt.parallel.place import Place
from mpt.parallel.ranks import Ranks
from mpt.parallel.start import choose_backend
from tests.cuda_rehearsal.torch_cuda import installed
from tests.engine.parts import DIGITS


@pytest.mark.cards("rtx3060", "rtx3060")
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_works_on_the_card_of_its_number_and_opens_no_context_on_another(rank: int) -> None:
    config = load_config({"model": {"name": "small_cnn", "features": 4}, "dataset": "digits"}, ["train.device=cuda"])
    device = choose_backend(config, Place(rank=rank, size=2, local_rank=rank, address="127.0.0.1", port=1))
    run = build_run(config, torch.device(device), DIGITS)
    assert {weight.device.index for weight in run.task.modules["net"].parameters()} == {rank}
    assert installed().contexts() == [rank]


def test_a_mean_over_ranks_takes_a_tasks_tensors_from_host_and_card() -> None:
    ranks = Ranks.__new__(Ranks)
    ranks.size, ranks.on_gpu, ranks.waited = 2, True, 0.0
    ranks.location = SimpleNamespace(is_waiting=False, moves=0)  # type: ignore[assignment]
    sent: list[str] = []

    def send(flat: torch.Tensor) -> SimpleNamespace:
        sent.append(flat.device.type)
        flat.add_(torch.tensor([3.0, 5.0, 7.0], device=flat.device))  # what the other rank has
        return SimpleNamespace(wait=lambda: None)

    ranks._send = send  # type: ignore[method-assign]
    on_host, on_card = torch.tensor([1.0, 3.0]), torch.tensor(5.0, device="cuda")
    ranks.average([on_host, on_card])
    assert sent == ["cuda"]
    assert on_host.tolist() == [2, 4]
    assert on_card.item() == 6
