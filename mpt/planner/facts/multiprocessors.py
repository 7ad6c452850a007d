"""How many multiprocessors a card has, and how many threads each of them holds.

Reductions give each thread that a card holds at once a place for its part of a sum (`Reduce.cuh`), so their scratch
follows from both. Figures are the makers' for each card, and CUDA's programming guide for each capability.
"""

from __future__ import annotations

from mpt.planner.facts.gpus import Gpu

COUNTS = {
    name: count
    for count, names in (
        (10, "gtx1060"),
        (14, "gtx1650"),
        (15, "gtx1070"),
        (16, "rtx2050-laptop rtx3050-laptop"),
        (18, "rtx3050-6gb"),
        (20, "gtx1080 gtx1650super rtx3050 rtx4050-laptop rtx5050 rtx5050-laptop p4"),
        (22, "gtx1660 gtx1660super rtx2000ada"),
        (24, "gtx1660ti rtx4060 rtx4060-laptop"),
        (26, "a2000 a2000-12gb rtx5060-laptop"),
        (28, "gtx1080ti rtx3060 rtx3060-8gb"),
        (30, "titanxp rtx2060 rtx3060-laptop rtx5060 p40"),
        (34, "rtx2060-12gb rtx2060super rtx4060ti rtx4060ti-16gb"),
        (36, "rtx2070 rtx4070-laptop rtx5060ti rtx5060ti-16gb rtx5070-laptop quadro-rtx4000"),
        (38, "rtx3060ti"),
        (40, "rtx2070super rtx3070-laptop t4"),
        (46, "rtx2080 rtx3070 rtx4070 rtx5070ti-laptop"),
        (48, "rtx2080super rtx3070ti rtx3080-laptop rtx3080-laptop-16gb rtx5070 quadro-rtx5000"),
        (48, "a4000 rtx4000ada"),
        (56, "rtx4070super p100 a4500 a30"),
        (58, "rtx3080ti-laptop rtx4080-laptop l4"),
        (60, "rtx4070ti rtx5080-laptop rtx4500ada"),
        (64, "a5000"),
        (66, "rtx4070tisuper"),
        (68, "rtx2080ti rtx3080"),
        (70, "rtx3080-12gb rtx5070ti"),
        (72, "titanrtx quadro-rtx6000 rtx8000 a10"),
        (76, "rtx4080 rtx4090-laptop"),
        (78, "h20"),
        (80, "titanv v100 v100-32gb rtx3080ti rtx4080super"),
        (82, "rtx3090 rtx5090-laptop"),
        (84, "rtx3090ti rtx5080 a40 a6000"),
        (92, "l20"),
        (100, "rtx5000ada"),
        (108, "a100 a100-80gb"),
        (128, "rtx4090"),
        (132, "h100 h200"),
        (142, "rtx6000ada l40 l40s"),
        (148, "b200"),
        (170, "rtx5090"),
        (188, "rtxpro6000"),
    )
    for name in names.split(" ")
}
"""NVIDIA's cards of the table."""
UNKNOWN = 60
"""Of AMD's cards and of those that are in no table: in the middle."""
THREADS = {(7, 5): 1024, (8, 6): 1536, (8, 9): 1536, (12, 0): 1536}
"""Threads that a multiprocessor of a capability holds; 2048 if it is not here."""


def multiprocessors(gpu: Gpu) -> int:
    """Return how many multiprocessors a card has."""
    return COUNTS.get(gpu.name, UNKNOWN)


def threads_of_one(capability: tuple[int, int]) -> int:
    """Return how many threads a multiprocessor holds."""
    return THREADS.get(capability, 2048)
