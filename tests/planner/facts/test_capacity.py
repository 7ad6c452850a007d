"""The memory that is planned for is the card's own, not the number on its box."""

import pytest

from mpt.errors import ConfigError
from mpt.planner.facts.calibration import load_calibration
from mpt.planner.facts.capacity import find_capacity
from mpt.planner.facts.gpus import SEEN, TABLE, find_gpu, installed_gpu
from mpt.planner.recipes.cheapest import parse_offers

GIB = 2**30


def test_a_card_gives_less_than_it_is_sold_with_and_never_less_than_nine_tenths() -> None:
    for gpu in TABLE:
        assert 0.9 * gpu.memory_gib <= gpu.usable_gib < gpu.memory_gib, gpu.name
        assert gpu.usable_source


def test_what_was_seen_is_taken_as_it_was_seen() -> None:
    by_name = {gpu.name: gpu for gpu in TABLE}
    assert set(SEEN) <= set(by_name)
    assert by_name["rtx2060"].usable_gib == 5.79
    # as the 3070 and others of 8 GiB
    assert by_name["rtx2060super"].usable_gib == pytest.approx(7.78, abs=0.01)


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("NVIDIA GeForce RTX 5080 Laptop GPU", "rtx5080-laptop"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA GeForce GTX 1060 6GB", "gtx1060"),
        ("NVIDIA GeForce GTX 1660 Ti with Max-Q Design", "gtx1660ti"),
        ("Quadro RTX 4000", "quadro-rtx4000"),
        ("NVIDIA RTX 4000 Ada Generation", "rtx4000ada"),
        ("AMD Radeon RX 7900 XTX", "rx7900xtx"),
        ("7900xtx", "rx7900xtx"),
        ("AMD Instinct MI300X", "mi300x"),
    ],
)
def test_cards_are_found_by_the_names_that_torch_gives_them(words: str, name: str) -> None:
    assert find_gpu(words).name == name


def test_newer_cards_keep_more_and_amd_less() -> None:
    assert find_gpu("rtx5060").usable_gib == pytest.approx(7.52, abs=0.02)
    assert find_gpu("rtx5080").usable_gib == pytest.approx(15.46, abs=0.02)
    assert find_gpu("rtx4080").usable_gib == pytest.approx(15.55, abs=0.02)
    assert find_gpu("rx6800").usable_gib == pytest.approx(15.92, abs=0.02)


def test_a_wrong_name_gets_each_near_one_once_and_an_intel_card_the_reason() -> None:
    with pytest.raises(ConfigError, match="nearest: mi250, mi210, "):
        find_gpu("mi50")
    for card in "Intel Arc A770", "b580":
        with pytest.raises(
            ConfigError, match="is an Intel card; training runs on it, but plans are of what"
        ):
            find_gpu(card)


def test_a_wrong_name_is_said_of_the_option_that_it_was_given_to() -> None:
    with pytest.raises(ConfigError, match=r"^--times-from: there is no 'rtx9999' in the table"):
        load_calibration("rtx3060", "rtx9999")
    with pytest.raises(ConfigError, match=r"^--cards: there is no 'rtx9999' in the table"):
        parse_offers(["rtx9999:4@1"])
    with pytest.raises(ConfigError, match=r"^--cards: 'arc a770' is an Intel card"):
        parse_offers(["arc a770"])


def test_an_empty_budget_is_refused_and_not_taken_for_none() -> None:
    with pytest.raises(ConfigError, match=r"^--vram: '' is not an amount of memory"):
        find_capacity(find_gpu("rtx3060"), True, "")


def test_an_installed_card_is_planned_with_what_was_read_from_it() -> None:
    assert installed_gpu("NVIDIA GeForce RTX 3060 Laptop GPU", 6 * GIB, (8, 6)).usable_gib == 6
    assert (
        installed_gpu("NVIDIA GeForce RTX 3060 Laptop GPU", 6 * GIB, (8, 6)).name
        == "rtx3060-laptop"
    )


def test_a_budget_beyond_the_card_is_cut_to_it_and_said() -> None:
    found = find_capacity(find_gpu("rtx2060"), True, "8GiB")
    assert found.budget_bytes == int(5.79 * GIB)
    assert "--vram 8GiB exceeds that, so those are planned for" in found.statements[0]
    smaller = find_capacity(find_gpu("rtx2060"), True, "4GiB")
    assert (smaller.budget_bytes, smaller.statements) == (4 * GIB, ())


def test_without_a_card_the_one_that_is_assumed_is_named() -> None:
    found = find_capacity(find_gpu("rtx3060"), False, "6GiB")
    assert found.budget_bytes == 6 * GIB
    assert "rtx3060" in found.statements[0]


def test_the_desktop_takes_its_part() -> None:
    found = find_capacity(find_gpu("rtx3090"), True, None, "1GiB")
    assert found.budget_bytes == int(23.70 * GIB) - GIB
    with pytest.raises(ConfigError, match="leaves nothing"):
        find_capacity(find_gpu("rtx3090"), True, "2GiB", "2GiB")
    with pytest.raises(ConfigError, match="--gpu or --vram"):
        find_capacity(find_gpu("rtx3090"), False, None, "1GiB")


def test_windows_takes_a_fifth_of_a_card_in_published_runs() -> None:
    found = find_capacity(find_gpu("rtx2060"), True, "6GiB", "wddm")
    assert found.budget_bytes == int(0.81 * find_gpu("rtx2060").usable_bytes)
    assert found.statements[-1] == "Windows takes 1,127 MiB; 4,802 MiB are left"
