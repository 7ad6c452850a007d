"""What ranks send over NCCL, which takes tensors on the card alone."""

from types import SimpleNamespace

import torch

from mpt.parallel.ranks import Ranks


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
