"""What connects cards, in numbers of the makers and of NCCL, written out."""

from __future__ import annotations

import pytest

from mpt.planner.facts.gpus import find_gpu
from mpt.planner.facts.links import find_cluster

pytestmark = pytest.mark.tier("fast")


@pytest.mark.parametrize(
    ("network", "of_two", "of_eight"),
    [
        ("ethernet-10", 1.25e9, 1.25e9),  # 10 Gbit/s: a machine has one port, however many cards
        ("ethernet-25", 3.125e9, 3.125e9),
        ("ethernet-100", 12.5e9, 12.5e9),
        ("infiniband-hdr", 50e9, 200e9),  # 200 Gbit/s for each card
        ("infiniband-ndr", 100e9, 400e9),
    ],
)
def test_a_network_gives_a_machine_its_bits_per_second_over_eight(
    network: str, of_two: float, of_eight: float
) -> None:
    rates = [find_cluster(find_gpu("h100"), network, cards).network_rate for cards in (2, 8)]
    assert rates == [of_two, of_eight]


@pytest.mark.parametrize(
    ("card", "link", "rate"),
    [
        ("a100", "NVLink", 300e9),  # half of the 600 GB/s of both ways
        ("h100", "NVLink", 450e9),
        ("rtx3060", "PCI Express", 6e9),  # through the host's memory: half of 12 GB/s
        ("gtx1080", "PCI Express", 6e9),
        ("t4", "PCI Express", 12e9),
    ],
)
def test_consumer_cards_reach_each_other_at_half_the_rate_of_the_hosts_link(
    card: str, link: str, rate: float
) -> None:
    found = find_cluster(find_gpu(card), None, 8)
    assert (found.link, found.link_rate) == (link, rate)


def test_collectives_inside_a_machine_take_latency_and_bytes_by_the_ring() -> None:
    """8.4 µs and 3.4 µs for each of 7 steps are NCCL's (`tuning.cc`); nccl-tests reach 0.8 of the link's 450 GB/s."""
    cluster = find_cluster(find_gpu("h100"), None, 8)
    gathered = 8.4e-6 + 7 * 3.4e-6 + 7 / 8 * 2**30 / 360e9
    reduced = 8.4e-6 + 14 * 3.4e-6 + 14 / 8 * 2**30 / 360e9
    assert cluster.seconds("all_gather", 2**30, 8) == pytest.approx(gathered, rel=1e-12)
    assert cluster.seconds("reduce_scatter", 2**30, 8) == pytest.approx(gathered, rel=1e-12)
    assert cluster.seconds("all_reduce", 2**30, 8) == pytest.approx(reduced, rel=1e-12)


def test_collectives_between_machines_take_what_the_network_gives() -> None:
    """0.9 of 3.125 GB/s; of 15 steps two are between machines, at 14 µs, and 13 over PCI Express, at 5.7 µs."""
    cluster = find_cluster(find_gpu("rtx3060"), "ethernet-25", 8)
    gathered = 8.4e-6 + 13 * 5.7e-6 + 2 * 14e-6 + 15 / 16 * 2**30 / 2.8125e9
    assert cluster.seconds("all_gather", 2**30, 16) == pytest.approx(gathered, rel=1e-12)
