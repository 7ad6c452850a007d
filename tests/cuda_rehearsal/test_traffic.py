"""Copies between the host and a card: how many are under way, and how often the host waits for them."""

import torch

import mpt
from mpt.config.load import load_config
from mpt.memory import offload_activations
from mpt.run.checkpoints.background_save import HostCopies
from tests.cuda_rehearsal.torch_cuda import installed


def test_a_forward_waits_for_copies_that_are_two_behind() -> None:
    trick = offload_activations.build(offload_activations.Settings(min_mebibytes=0.001))
    x = torch.rand(600, device="cuda", requires_grad=True)
    extension = installed().extension
    before = extension.count_of("stream waits for an event")
    with trick.forward():
        y = x
        for _ in range(5):
            y = y.exp()
    waits = extension.count_of("stream waits for an event") - before
    # each copy for the computation, and the computation for all but the last two copies
    assert waits == 5 + 3
    y.sum().backward()
    assert x.grad is not None
    assert extension.count_of("record_stream") == 0


def test_a_step_on_the_host_waits_once_for_all_its_gradients() -> None:
    config = load_config(
        {
            "model": {"name": "small_cnn", "features": 4, "image_size": 8},
            "dataset": "digits",
            "optimizer": "adam",
            "precision": "fp32",
            "memory": {"cpu_optimizer": True},
            "train": {"steps": 4, "batch_size": 32, "device": "cuda"},
        }
    )
    built = mpt.build(config)
    batches = built.batches()
    mpt.update(built, next(batches), 0)
    batch = next(batches)
    with installed().notes.listen() as waits:
        mpt.update(built, batch, 1)
    assert [wait.function for wait in waits if "cpu_optimizer" in wait.line] == [
        "HostOptimizer.step"
    ]
    for parameter in built.run.task.modules["net"].parameters():
        assert torch.isfinite(parameter).all()


def test_a_state_is_copied_for_a_save_into_registered_memory_without_waiting_for_each_tensor() -> (
    None
):
    tensors = {
        str(number): torch.full((number,), float(number), device="cuda") for number in range(1, 9)
    }
    tensors["host"] = torch.ones(3)
    registered: list[int] = []
    asked: list[bool] = []
    copy_ = torch.Tensor.copy_

    def noted(self: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        asked.append(non_blocking)
        return copy_(self, source, non_blocking)

    torch.cuda.cudart().cudaHostRegister = lambda address, size, flags: registered.append(size)
    torch.Tensor.is_pinned = lambda self: True  # type: ignore[method-assign, assignment]
    torch.Tensor.copy_ = noted  # type: ignore[method-assign, assignment]
    copies = HostCopies()
    for _ in range(2):  # into new memory, and into memory that is kept
        found = copies.of(tensors, sum(tensor.nbytes for tensor in tensors.values()), True)
    torch.Tensor.copy_ = copy_  # type: ignore[method-assign]
    assert len(registered) == 1
    assert asked == [*[True] * 8, False] * 2
    assert found is not None
    assert all(torch.equal(found[name], tensor.cpu()) for name, tensor in tensors.items())
