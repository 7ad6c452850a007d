"""Which card a rank works on, and what ranks send over NCCL, which takes tensors on the card alone."""

import json
import os
import socket
import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from mpt.config.load import load_config
from mpt.engine.building.build import build_run
from mpt.parallel.place import Place
from mpt.parallel.ranks import Ranks
from mpt.parallel.start import choose_backend
from tests.cuda_rehearsal.programs import CLASSIFIER, train
from tests.cuda_rehearsal.torch_cuda import installed
from tests.cuda_rehearsal.torch_nccl import OPENED
from tests.engine.parts import DIGITS


@pytest.mark.cards("rtx3060", "rtx3060")
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_works_on_the_card_of_its_number_and_opens_no_context_on_another(rank: int) -> None:
    config = load_config(
        {"model": {"name": "small_cnn", "features": 4}, "dataset": "digits"}, ["train.device=cuda"]
    )
    device = choose_backend(
        config, Place(rank=rank, size=2, local_rank=rank, address="127.0.0.1", port=1)
    )
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


def in_two_ranks(work: Callable[[int], None], allowed: str = "nothing") -> None:
    """Run a function in two processes that were forked before the cards are used, as ranks 0 and 1 of one machine.

    Races whose words hold `allowed` are.
    """
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    world = {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    children = []
    for rank in (0, 1):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                os.environ.update(world, RANK=str(rank), LOCAL_RANK=str(rank))
                work(rank)
                assert not [race for race in installed().notes.races if allowed not in race.what]
                code = 0
            except BaseException:
                traceback.print_exc()
            os._exit(code)
        children.append(child)
    ended = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert ended == [0, 0], f"a rank failed: {ended}"


def weights(run: Path) -> dict[str, torch.Tensor]:
    """Return the weights of a run's last checkpoint."""
    return load_file(run / "checkpoints" / "step-00000004" / "state.safetensors")


@pytest.mark.cards("rtx3060", "rtx3060")
def test_two_ranks_on_two_cards_connect_by_their_card_and_train_as_one_process_does(
    tmp_path: Path,
) -> None:
    together = "parallel.sync_batchnorm=true"

    def rank(number: int) -> None:
        said = train(tmp_path, CLASSIFIER, "name=two", "train.plan_memory=null", together)
        assert said.code == 0, said
        assert set(OPENED) == {(number, torch.device("cuda", number))}
        assert installed().contexts() == [number]
        if number == 0:
            assert "memory allocated: planned" in said.text, said

    in_two_ranks(rank)
    alone = train(tmp_path, CLASSIFIER, "name=alone", together)
    assert alone.code == 0, alone
    two, one = (weights(tmp_path / "runs" / name) for name in ("two", "alone"))
    for name, value in one.items():
        if value.is_floating_point():
            torch.testing.assert_close(two[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.cards("rtx3060", "rtx3060")
def test_two_ranks_that_shard_their_weights_train_as_one_process_does(tmp_path: Path) -> None:
    """FSDP2 keeps gradients in the pool of its own stream, which waits for the step before it gives them out again."""

    def rank(number: int) -> None:
        words = (
            "name=two",
            "parallel={strategy: fsdp, sync_batchnorm: true}",
            "train.asynchronous_save=false",
        )
        said = train(tmp_path, CLASSIFIER, *words)
        assert said.code == 0, said
        assert installed().contexts() == [number]

    in_two_ranks(rank, allowed="is freed while")
    alone = train(tmp_path, CLASSIFIER, "name=alone", "parallel.sync_batchnorm=true")
    assert alone.code == 0, alone
    two, one = (
        (tmp_path / "runs" / name / "summary.json").read_text() for name in ("two", "alone")
    )
    assert json.loads(two)["final"] == pytest.approx(json.loads(one)["final"], abs=1e-6)


@pytest.mark.cards("rtx3060", "rtx3060")
def test_nccl_refuses_two_ranks_on_one_card_and_another_ranks_tensors() -> None:
    def rank(number: int) -> None:
        store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), 2, number == 0)
        options = {"store": store, "rank": number, "world_size": 2}
        with pytest.raises(dist.DistBackendError, match="Duplicate GPU"):
            dist.init_process_group("nccl", device_id=torch.device("cuda", 0), **options)
        store.set(f"tried/{number}", "")
        store.wait(["tried/0", "tried/1"])
        dist.init_process_group("nccl", device_id=torch.device("cuda", number), **options)
        with pytest.raises(RuntimeError, match="constrained to"):
            dist.all_reduce(torch.ones(2, device=torch.device("cuda", 1 - number)))
        with pytest.raises(RuntimeError, match="device type cpu"):
            dist.all_reduce(torch.ones(2))
        value = torch.full((3,), number + 1.0, device="cuda" if number == 0 else "cuda:1")
        work = dist.all_reduce(value, async_op=True)
        work.wait()
        assert value.tolist() == [3, 3, 3]
        dist.destroy_process_group()

    in_two_ranks(rank)
