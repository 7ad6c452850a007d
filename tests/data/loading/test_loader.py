import itertools
import os
import signal
import time

import pytest
import torch

from mpt.data import digits, shapes
from mpt.data.loading import workers
from mpt.data.loading.loader import Loader, prefetch, to_device
from mpt.data.loading.workers import WorkerPool, serve
from mpt.errors import DataError
from mpt.parallel.world import share
from mpt.seams import Dataset, DataSpec, FieldSpec

pytestmark = pytest.mark.tier("fast")


class Numbers(Dataset):
    """A data set whose samples are their own indices and epochs; `trouble` is called before each fetch."""

    def __init__(self, count, trouble=None):
        self.count, self.trouble = count, trouble
        self.spec = DataSpec({"label": FieldSpec((2,), torch.int64)}, count)

    def __len__(self):
        return self.count

    def fetch(self, indices, epoch):
        if self.trouble is not None:
            self.trouble(indices)
        return {"label": torch.tensor([[index, epoch] for index in indices])}


def labels(batches, count):
    return [batch["label"].tolist() for batch in itertools.islice(batches, count)]


def same(one, other):
    return all(torch.equal(a[name], b[name]) for a, b in zip(one, other, strict=True) for name in a)


@pytest.mark.parametrize("drop_last", [True, False])
def test_an_epoch_holds_every_sample_once_and_epochs_differ(drop_last):
    loader = Loader(Numbers(10), 3, seed=0, drop_last=drop_last)
    assert loader.steps_per_epoch == (3 if drop_last else 4)
    stream = loader.batches()
    epochs = [list(itertools.chain(*labels(stream, loader.steps_per_epoch))) for _ in range(3)]
    for number, epoch in enumerate(epochs):
        indices = [index for index, _ in epoch]
        assert len(set(indices)) == len(indices) == (9 if drop_last else 10)
        assert {drawn_in for _, drawn_in in epoch} == {number}
    assert [index for index, _ in epochs[0]] != [index for index, _ in epochs[1]]
    assert labels(Loader(Numbers(10), 3, seed=1, drop_last=drop_last).batches(), 1) != [
        epochs[0][:3]
    ]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("start", [0, 2, 3, 6, 10])
def test_a_stream_begun_at_any_step_goes_on_as_the_one_never_stopped(workers, start):
    whole = labels(Loader(Numbers(10), 3, seed=5).batches(), 16)
    assert (
        labels(Loader(Numbers(10), 3, seed=5, workers=workers).batches(start), 16 - start)
        == whole[start:]
    )


def test_without_shuffling_the_order_is_the_data_sets_own():
    assert [[i for i, _ in batch] for batch in labels(Loader(Numbers(5), 2, 0, shuffle=False).batches(), 3)] == [
        [0, 1], [2, 3], [0, 1],
    ]  # fmt: skip


def test_ranks_share_a_smaller_last_batch_as_evenly_as_a_whole_one():
    parts = [
        Loader(
            Numbers(6),
            4,
            0,
            drop_last=False,
            shuffle=False,
            place=lambda count, rank=rank: share(count, rank, 2),
        )
        for rank in range(2)
    ]
    found = [
        [[index for index, _ in batch] for batch in labels(part.batches(), 2)] for part in parts
    ]
    assert found == [[[0, 1], [4]], [[2, 3], [5]]]


@pytest.mark.parametrize("workers", [0, 2])
def test_evaluation_sees_every_sample_in_order_with_a_ragged_last_batch(workers):
    batches = list(Loader(Numbers(10), 4, seed=3, workers=workers).evaluation_batches())
    assert [len(batch["label"]) for batch in batches] == [4, 4, 2]
    assert torch.cat([batch["label"] for batch in batches])[:, 0].tolist() == list(range(10))


def test_augmented_batches_are_bit_identical_for_any_number_of_workers_and_batch_size():
    settings = digits.Settings(
        image_size=16, augment=[{"RandomAffine": {"degrees": 20}}, "RandomErasing"]
    )
    data = digits.build(settings, "train", seed=9)
    start = Loader(data, 8, 0).steps_per_epoch - 2  # across the end of an epoch
    runs = [
        list(itertools.islice(Loader(data, 8, 0, workers=w).batches(start), 5)) for w in (0, 1, 3)
    ]
    assert same(runs[0], runs[1])
    assert same(runs[0], runs[2])
    indices, epoch = Loader(data, 8, 0).indices(start)
    assert torch.equal(data.fetch(indices[3:4], epoch)["image"][0], runs[0][0]["image"][3])


@pytest.mark.parametrize("workers", [0, 2])
def test_loading_leaves_the_global_generator_alone(workers):
    data = shapes.build(
        shapes.Settings(size=16, image_size=8, augment=["RandomHorizontalFlip"]), "train", 0
    )
    before = torch.get_rng_state()
    list(itertools.islice(Loader(data, 4, 0, workers=workers).batches(), 6))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_killed_worker_is_named_within_five_seconds():
    def die_on_20(indices):
        if 20 in indices:
            os.kill(os.getpid(), signal.SIGKILL)

    stream = Loader(Numbers(40, die_on_20), 4, 0, workers=2, shuffle=False).batches()
    started = time.monotonic()
    with pytest.raises(
        DataError, match=r"data worker 1 \(process \d+\) was killed by SIGKILL before it delivered"
    ) as caught:
        list(itertools.islice(stream, 10))
    assert time.monotonic() - started < 5
    assert caught.value.exit_code == 3


def test_a_worker_killed_from_outside_is_noticed_even_when_another_is_next():
    loader = Loader(Numbers(40, lambda indices: time.sleep(0.05)), 4, 0, workers=2)
    stream = loader.batches()
    next(stream)
    worker = stream.gi_frame.f_locals["pool"].workers[1]
    os.kill(worker.process.pid, signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(DataError, match=r"data worker 1 .*SIGKILL"):
        list(itertools.islice(stream, 20))
    assert time.monotonic() - started < 5


def test_a_hung_worker_is_named_after_the_timeout():
    def hang(indices):
        if 8 in indices:
            time.sleep(60)

    stream = Loader(
        Numbers(40, hang), 4, 0, workers=2, shuffle=False, timeout_seconds=0.5
    ).batches()
    started = time.monotonic()
    with pytest.raises(
        DataError, match=r"data worker 0 \(process \d+\) gave no batch for 0\.5 seconds"
    ):
        list(itertools.islice(stream, 10))
    assert time.monotonic() - started < 5


def test_an_error_in_a_worker_reaches_the_main_process_as_it_was():
    def refuse(indices):
        raise DataError("file x is bad")

    def fail(indices):
        raise ZeroDivisionError("by design")

    with pytest.raises(DataError, match=r"^file x is bad$"):
        next(Loader(Numbers(8, refuse), 4, 0, workers=1).batches())
    with pytest.raises(DataError, match="by design"):
        next(Loader(Numbers(8, fail), 4, 0, workers=1).batches())


def test_no_worker_outlives_the_stream_and_ctrl_c_does_not_end_one():
    stream = Loader(Numbers(40), 4, 0, workers=2).batches()
    next(stream)
    processes = [worker.process for worker in stream.gi_frame.f_locals["pool"].workers]
    for process in processes:
        os.kill(process.pid, signal.SIGINT)
    assert len(labels(stream, 8)) == 8
    assert all(process.is_alive() for process in processes)
    stream.close()
    assert not any(process.is_alive() for process in processes)


def test_a_worker_that_does_not_start_is_named(monkeypatch):
    monkeypatch.setattr(workers, "serve", serve_late)
    monkeypatch.setattr(workers, "STARTING_SECONDS", 0.1)
    with WorkerPool(Numbers(8), 1, 0.1) as pool:
        pool.send([1, 2], 0, True)
        with pytest.raises(DataError, match=r"has not started within 0\.1 seconds"):
            pool.receive()


def serve_late(*arguments):
    time.sleep(0.6)
    serve(*arguments)


def test_a_worker_that_starts_late_is_waited_for_and_not_ended_by_ctrl_c(monkeypatch):
    monkeypatch.setattr(workers, "serve", serve_late)
    with WorkerPool(Numbers(8), 1, 0.5) as pool:
        os.kill(pool.workers[0].process.pid, signal.SIGINT)
        pool.send([1, 2], 0, True)
        assert pool.receive()["label"].tolist() == [[1, 0], [2, 0]]
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


@pytest.mark.parametrize(
    ("count", "message"), [(0, "the data set is empty"), (3, "3 samples, fewer than one batch")]
)
def test_too_few_samples_are_a_data_error_and_never_a_run_of_no_steps(count, message):
    with pytest.raises(DataError, match=message) as caught:
        Loader(Numbers(count), 4, 0)
    assert caught.value.exit_code == 3


def test_loading_from_memory_costs_little_per_batch():
    stream = Loader(digits.build(digits.Settings(image_size=32), "train", 0), 64, 0).batches()
    next(stream)
    fastest = float("inf")
    for _ in range(20):
        started = time.perf_counter()
        for _ in range(20):
            next(stream)
        fastest = min(fastest, (time.perf_counter() - started) / 20)
    assert fastest < 200e-6  # about 20e-6 on a quiet machine


def test_prefetching_keeps_order_and_content():
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    loader = Loader(Numbers(10), 3, seed=0, pin_memory=True)
    arrived = itertools.islice(prefetch(loader.batches(), device, loader.dataset.spec), 7)
    assert [batch["label"].tolist() for batch in arrived] == labels(loader.batches(), 7)
    assert (
        to_device(next(loader.batches()), device, loader.dataset.spec)["label"].device.type
        == device.type
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_prefetched_batches_are_not_overwritten_while_the_gpu_is_still_busy_with_them():
    data = shapes.build(shapes.Settings(size=256, image_size=64), "train", 0)
    loader = Loader(data, 64, 0, pin_memory=True)
    sums = []
    weight = torch.randn(2048, 2048, device="cuda")
    for batch in itertools.islice(prefetch(loader.batches(), torch.device("cuda"), data.spec), 40):
        for _ in range(5):
            weight = torch.nn.functional.normalize(weight @ weight)
        sums.append(batch["image"].double().sum())
    expected = [
        (batch["image"] / 255).double().sum() for batch in itertools.islice(loader.batches(), 40)
    ]
    assert torch.allclose(torch.stack(sums).cpu(), torch.stack(expected))
