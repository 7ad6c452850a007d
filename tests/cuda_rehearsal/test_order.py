"""Work that no event, wait or `record_stream` orders is reported: on a GPU it is right or wrong by chance."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.cuda_rehearsal.torch_cuda import installed

CARD = torch.device("cuda", 0)


def races() -> list[str]:
    """Return the races so far, and forget them."""
    found = installed().notes.races
    said = [str(race) for race in found]
    found.clear()
    return said


def one_race(*words: str) -> None:
    """Check that there was one race, which is put in these words and has a line of this file."""
    (found,) = races()
    for word in (*words, "test_order.py:"):
        assert word in found


def side_stream() -> torch.cuda.Stream:
    return torch.cuda.Stream(CARD)  # type: ignore[no-untyped-call, no-any-return]


def twice(values: Tensor, on: torch.cuda.Stream) -> Tensor:
    with torch.cuda.stream(on):
        return values * 2


def test_a_result_is_read_before_its_stream_was_waited_for() -> None:
    side = side_stream()
    values = torch.ones(4, device=CARD)
    doubled = twice(values, side)
    one_race("aten::mul on stream 1 uses what aten::fill_ has written on the default stream")
    doubled.record_stream(torch.cuda.current_stream())
    doubled.add(1)
    one_race("aten::add on the default stream uses what aten::mul has written on stream 1")


def test_streams_that_wait_for_each_other_are_in_order() -> None:
    side, arrived = side_stream(), torch.cuda.Event()  # type: ignore[no-untyped-call]
    values = torch.ones(4, device=CARD)
    side.wait_stream(torch.cuda.current_stream())
    doubled = twice(values, side)
    arrived.record(side)
    torch.cuda.current_stream().wait_event(arrived)
    doubled.record_stream(torch.cuda.current_stream())
    assert doubled.sum().item() == 8
    later = twice(values, side)
    torch.cuda.synchronize()
    later.add(1)
    torch.cuda.synchronize()
    del later, doubled
    assert not races()


def test_an_event_that_was_recorded_too_early_orders_nothing_after_it() -> None:
    side, arrived = side_stream(), torch.cuda.Event()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    arrived.record(side)
    with torch.cuda.stream(side):
        values = torch.ones(4, device=CARD)
    torch.cuda.current_stream().wait_event(arrived)
    values.record_stream(torch.cuda.current_stream())
    values.add(1)
    one_race("aten::add on the default stream uses what aten::fill_ has written on stream 1")


def test_memory_goes_back_to_its_pool_while_another_stream_reads_it() -> None:
    side = side_stream()
    values = torch.ones(4, device=CARD)
    side.wait_stream(torch.cuda.current_stream())
    twice(values, side)
    del values
    one_race(
        "memory of the default stream is freed while aten::mul has read it on stream 1",
        "record_stream",
    )
    values = torch.ones(4, device=CARD)
    side.wait_stream(torch.cuda.current_stream())
    twice(values, side)
    values.record_stream(side)
    del values
    assert not races()


def test_memory_is_kept_by_a_stream_that_has_waited_for_the_other() -> None:
    """The allocator records an event on a recorded stream, behind all that this has waited for."""
    side = side_stream()
    with torch.cuda.stream(side_stream()):
        values = torch.ones(4, device=CARD)
        arrived = torch.cuda.current_stream().record_event()
    torch.cuda.current_stream().wait_event(arrived)
    values.record_stream(torch.cuda.current_stream())
    side.wait_stream(torch.cuda.current_stream())
    twice(values, side)
    torch.cuda.current_stream().wait_stream(side)
    del values
    assert not races()


def test_memory_of_one_pool_is_written_by_a_stream_that_has_not_waited() -> None:
    """Whoever had it before may still be at work: the allocator gives freed memory on at once."""
    side, pinned = side_stream(), torch.ones(4).pin_memory()
    torch.ones(4, device=CARD).add_(1)
    arriving = torch.empty(4, device=CARD)
    with torch.cuda.stream(side):
        arriving.copy_(pinned, non_blocking=True)
    one_race(
        "aten::copy_ on stream 1 uses what whoever had this memory before has written on the default stream"
    )
    torch.cuda.synchronize()


def test_the_host_reads_a_copy_before_it_has_arrived() -> None:
    values, arrived = torch.ones(4, device=CARD), torch.cuda.Event()  # type: ignore[no-untyped-call]
    host = torch.empty(4, pin_memory=True)
    for read in (
        Tensor.sum,
        Tensor.numpy,
        Tensor.tolist,
        lambda found: float(found[0]),
        lambda found: found + 1,
    ):
        host.copy_(values, non_blocking=True)
        read(host)
        one_race(
            "on the host reads page-locked memory that aten::copy_ has written on the default stream"
        )
        host.copy_(values, non_blocking=True)
        arrived.record()
        arrived.synchronize()
        read(host)
        assert not races()


def test_the_host_overwrites_what_is_being_copied() -> None:
    host, values = torch.ones(4, pin_memory=True), torch.empty(4, device=CARD)
    values.copy_(host, non_blocking=True)
    host.fill_(2)
    one_race(
        "aten::fill_ on the host overwrites page-locked memory that aten::copy_ has read on the default stream"
    )
    values.copy_(host, non_blocking=True)
    host[1:].view(-1)  # shows it in another way
    torch.cuda.current_stream().synchronize()
    host.fill_(3)
    assert not races()


def test_autograd_orders_its_streams() -> None:
    side, weight = side_stream(), nn.Parameter(torch.ones(4, 4, device=CARD))
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        loss = (weight @ weight).relu().sum()
    torch.cuda.current_stream().wait_stream(side)
    loss.backward()
    assert weight.grad is not None
    weight.grad.add_(1)
    torch.cuda.synchronize()
    assert not races()


def test_the_host_may_use_what_lies_beside_a_copy_that_is_under_way() -> None:
    values, host = torch.ones(4, device=CARD), torch.zeros(8, pin_memory=True)
    host[:4].copy_(values, non_blocking=True)
    host[4:].fill_(2)
    assert host[4:].sum() == 8
    assert not races()
    host[3:5].fill_(2)
    one_race(
        "aten::fill_ on the host overwrites page-locked memory that aten::copy_ has written on the default stream"
    )


def test_memory_that_the_driver_has_registered_is_pinned() -> None:
    values, host = torch.ones(4, device=CARD), torch.zeros(4)
    torch.cuda.cudart().cudaHostRegister(host.data_ptr(), host.nbytes, 0)  # type: ignore[no-untyped-call]
    assert host.is_pinned()
    host.copy_(values, non_blocking=True)
    host.sum()
    one_race("aten::sum on the host reads page-locked memory")
    torch.cuda.cudart().cudaHostUnregister(host.data_ptr())  # type: ignore[no-untyped-call]
    assert not host.is_pinned()
