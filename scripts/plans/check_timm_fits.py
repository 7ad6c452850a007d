"""Compare "fits" and "does not fit" with the batch sizes that timm's training benchmark reached on an RTX 3090.

    pip install --no-deps --target OLD timm==0.6.7
    PYTHONPATH=OLD python scripts/plans/check_timm_fits.py CONTIGUOUS.csv CHANNELS_LAST.csv ROWS.jsonl --sample 400
    ... -o docs/benchmarks/timm_fits.md      # the page, from the rows that are there

The tables are those of `check_timm_times.py`. The benchmark began with a batch of 512 and went down a series (512, 384,
256, 192, ...) after each failure, so that a row answers two questions: its batch fits in 24 GB, and the next larger of
the series does not. The step is planned as a step of one's own: `build_step` is what timm 0.6.7's `benchmark.py` does
with torch 1.12 (gradients filled with zeros, an optimizer without foreach, no scaler, no data loading). Nothing is
fitted. Rows are planned in the order of a drawn sample and kept, so that more can be planned later.
"""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import torch
from torch import nn

from mpt.errors import MptError
from mpt.planner.facts.calibration import CONTEXT_BYTES, Calibration
from mpt.planner.facts.gpus import find_gpu
from mpt.planner.facts.verdict import judge
from mpt.planner.own.execution.source import Source
from mpt.planner.own.proposals.changes import Changes
from mpt.planner.own.trace import trace_own
from mpt.planner.plans.plan import Wish, describe
from mpt.planner.server.worker import preload
from mpt.planner.trace.unseen import unseen_on
from mpt.vision_ops import import_torchvision
from scripts.command_line import described
from scripts.plans.check_timm_times import GPU, Row, read
from scripts.provenance import made

MIB = 2**20
FIRST_BATCH = 512
CLASSES = 1000
EAGER_CONTEXT = 1685 * MIB
"""CUDA's context with torch 1.8.2 and CUDA 11.1 on an RTX 3090, which loads all kernels at once: 1,687 MiB less the
segment of one tensor (https://github.com/pytorch/pytorch/issues/55277). Kernels are loaded lazily since torch 1.13 with
CUDA 11.7 (https://github.com/pytorch/pytorch/pull/86509)."""
CONTEXTS = {"CUDA 11, all kernels loaded": EAGER_CONTEXT, "today's": CONTEXT_BYTES}
INDEXED = 2**31
"""Elements of a tensor from which on kernels with 32-bit indices refuse it."""
KINDS = ("fits", "may fit", "does not fit")
CLOSE = (0.85, 1.15)
"""A question is close if a plan's reserved memory is that share of the card."""
BANDS = ((0.0, 0.05), (0.05, 0.5), (0.5, 0.95), (0.95, 1.0))


@dataclass(frozen=True)
class Answer:
    """A question and what was planned for it."""

    model: str
    layout: str
    size: int
    batch: int
    ran: bool
    """By the table. A batch that is not in it, the next larger, did not run."""
    error: str = ""
    allocated: int = 0
    reserved: int = 0
    largest_tensor: int = 0
    """Elements, at most: its bytes as float16."""
    kinds: tuple[str, ...] = ()
    """With each of `CONTEXTS`."""
    chances: tuple[float, ...] = ()

    @property
    def name(self) -> str:
        """The row's name."""
        return f"{self.model}, {self.layout}"


def series() -> Iterator[int]:
    """Yield the benchmark's batch sizes, the largest first: two steps from each power of two to the next lower."""
    power = FIRST_BATCH
    while power > 1:
        yield power
        if power > 2:
            yield power * 3 // 4
        power //= 2
    yield 1


def next_larger(batch: int) -> int | None:
    """Return the batch that was tried before, None for the first."""
    return next((larger for larger in reversed(list(series())) if larger > batch), None)


def build_step(model: str, batch_size: int, size: int, channels_last: bool) -> Any:
    """Return a training step as timm's benchmark took it with torch 1.12."""
    import timm

    layout = torch.channels_last if channels_last else torch.contiguous_format
    network = timm.create_model(model, num_classes=CLASSES)
    network.to(device="cuda", memory_format=layout)
    network.train()
    weights = [weight for weight in network.parameters() if weight.requires_grad]
    optimizer = torch.optim.SGD(weights, lr=1e-4, momentum=0.9, nesterov=True, foreach=False)
    images = torch.randn(batch_size, 3, size, size, device="cuda").contiguous(memory_format=layout)
    loss = nn.CrossEntropyLoss()

    def step() -> None:
        optimizer.zero_grad(set_to_none=False)
        with torch.autocast("cuda", torch.float16):
            found = network(images)
            output = found[0] if isinstance(found, tuple) else found
            labels = torch.empty(len(output), device="cuda", dtype=torch.long).random_(CLASSES)
            loss(output, labels).backward()
        optimizer.step()

    return network, optimizer, images, step


def questions(row: Row) -> Iterator[tuple[int, bool]]:
    """Yield the batches of a row, and whether each ran."""
    yield row.batch, True
    larger = next_larger(row.batch)
    if larger is not None:
        yield larger, False


def answer(row: Row, batch: int, ran: bool) -> Answer:
    """Plan one batch of a row."""
    gpu = find_gpu(GPU)
    layout = "channels_last" if row.channels_last else "contiguous"
    asked = {"model": row.model, "size": row.size, "batch": batch, "layout": layout, "ran": ran}
    source = Source("scripts.plans.check_timm_fits", build_step.__name__, str(Path.cwd()))
    arguments = {
        "model": row.model,
        "batch_size": batch,
        "size": row.size,
        "channels_last": row.channels_last,
    }
    try:
        run = trace_own(source, arguments, gpu, unseen_on(gpu), Changes()).fake
    except MptError as error:
        return Answer(**asked, error=str(error))
    kinds, chances = [], []
    for context in CONTEXTS.values():
        wish = Wish(budget_bytes=gpu.usable_bytes)
        plan = describe(run, batch, gpu, Calibration(), wish, context, False, None)
        found = judge(plan)
        assert found is not None
        kinds.append(found.kind)
        chances.append(round(found.chance, 4))
    largest = max(storage.size for storage in run.trace.storages) // 2
    return Answer(
        **asked,
        allocated=plan.allocated,
        reserved=plan.reserved,
        largest_tensor=largest,
        kinds=tuple(kinds),
        chances=tuple(chances),
    )


def load(path: Path) -> list[Answer]:
    """Return the answers of a file."""
    lines = path.read_text("utf-8").splitlines() if path.is_file() else []
    return [Answer(**json.loads(line)) for line in lines]


def plan_rows(rows: Sequence[Row], path: Path) -> None:
    """Append the answers that a file lacks."""
    known = {(one.name, one.batch) for one in load(path)}
    with path.open("a", encoding="utf-8") as file:
        for row in rows:
            for batch, ran in questions(row):
                layout = "channels_last" if row.channels_last else "contiguous"
                if (f"{row.model}, {layout}", batch) not in known:
                    file.write(json.dumps(asdict(answer(row, batch, ran))) + "\n")
                    file.flush()


def table(heads: Sequence[str], rows: Sequence[Sequence[object]], texts: int = 1) -> list[str]:
    """Return a table whose first columns are texts and whose others are numbers."""
    rule = "|".join("---" if place < texts else "---:" for place in range(len(heads)))
    lines = [f"| {' | '.join(heads)} |", f"|{rule}|"]
    return lines + [f"| {' | '.join(map(str, row))} |" for row in rows] + [""]


def share(part: int, whole: int) -> str:
    """Return a share for people."""
    return f"{part / whole:.1%}" if whole else "-"


def verdict_rows(answers: Sequence[Answer], place: int) -> Iterator[tuple[object, ...]]:
    """Yield a row for each verdict: how many batches it was said of, how close, and how many of them ran."""
    context, usable = list(CONTEXTS.values())[place], find_gpu(GPU).usable_bytes
    for kind in KINDS:
        said = [one for one in answers if one.kinds[place] == kind]
        ran = sum(one.ran for one in said)
        close = sum(CLOSE[0] <= (one.reserved + context) / usable <= CLOSE[1] for one in said)
        right = {"fits": ran, "does not fit": len(said) - ran}.get(kind)
        percent = "" if right is None else share(right, len(said))
        yield kind, len(said), close, ran, len(said) - ran, percent


def band_rows(answers: Sequence[Answer], place: int) -> Iterator[tuple[object, ...]]:
    """Yield a row for each band of chances."""
    for low, high in BANDS:
        within = [one for one in answers if low <= one.chances[place] < high + (high == 1.0)]
        ran = sum(one.ran for one in within)
        yield f"{low:.0%} to {high:.0%}", len(within), ran, share(ran, len(within))


def is_wrong(one: Answer, place: int) -> bool:
    """Whether "fits" was said of a batch that did not run, or "does not fit" of one that did."""
    return one.kinds[place] == ("does not fit" if one.ran else "fits")


def detail_rows(
    answers: Sequence[Answer], place: int, chosen: Callable[[Answer], bool]
) -> Iterator[tuple[object, ...]]:
    """Yield a row for each chosen answer, by its allocated memory."""
    context = list(CONTEXTS.values())[place]
    for one in sorted(filter(chosen, answers), key=lambda one: one.allocated):
        yield (
            one.name,
            one.batch,
            "ran" if one.ran else "did not",
            one.kinds[place],
            f"{one.chances[place]:.0%}",
            f"{(one.allocated + context) // MIB:,}",
            f"{(one.reserved + context) // MIB:,}",
        )


DETAILS = ("Model", "Batch", "On the card", "Said", "Chance", "Tensors MiB", "Reserved MiB")


def report(answers: Sequence[Answer]) -> str:
    """Return the page's tables."""
    planned = [one for one in answers if not one.error]
    lines: list[str] = []
    for place, (name, context) in enumerate(CONTEXTS.items()):
        lines += [f"## With a context of {context // MIB:,} MiB ({name})", ""]
        heads = ("Said", "Questions", "Close", "Ran", "Did not run", "Right")
        lines += table(heads, list(verdict_rows(planned, place)))
        heads = ("Chance", "Questions", "Ran", "Share")
        lines += table(heads, list(band_rows(planned, place)))
        wrong = list(detail_rows(planned, place, lambda one: is_wrong(one, place)))  # noqa: B023
        lines += [f"Wrong answers: {len(wrong) or 'none'}.", ""]
        lines += table(DETAILS, wrong, 4) if wrong else []
    lines += ["## At the switch", "", *switch(planned)]
    lines += ["## Not planned", ""]
    reasons = Counter(one.error.partition(", at ")[0] for one in answers if one.error)
    lines += [f"- {count} questions: {reason}" for reason, count in reasons.most_common()]
    indexed = [one for one in planned if not one.ran and one.largest_tensor >= INDEXED]
    names = ", ".join(f"{one.name} ({one.batch})" for one in indexed) or "none"
    lines += [
        "",
        "Batches that did not run and may have failed for another reason, since one of their tensors has 2^31 elements "
        f"or more in float16: {names}.",
    ]
    return "\n".join(lines)


def switch(planned: Sequence[Answer]) -> list[str]:
    """Return where batches stop to run: planned memory against the card's."""
    usable, context = find_gpu(GPU).usable_bytes, EAGER_CONTEXT

    def needs(one: Answer) -> int:
        return one.allocated + context

    early = [one for one in planned if not one.ran and one.kinds[0] != KINDS[-1]]
    rows = []
    for layout in ("contiguous", "channels_last"):
        some = [one for one in planned if one.layout == layout]
        ran = [needs(one) / usable for one in some if one.ran]
        failed = [needs(one) / usable for one in some if not one.ran]
        if ran and failed:
            rows.append((layout, len(ran), f"{max(ran):.1%}", len(failed), f"{min(failed):.1%}"))
    heads = ("Layout", "Ran", "The most of them", "Did not run", "The least of them")
    return [
        f"Tensors and a context of {context // MIB:,} MiB as a share of what the card gives programs "
        f"({usable // MIB:,} MiB).",
        "",
        *table(heads, rows),
        "Batches that did not run and that the plan does not exclude:",
        "",
        *table(DETAILS, list(detail_rows(early, 0, lambda one: True)), 4),
    ]


def smaller_in(rows: Sequence[Row]) -> Counter[str]:
    """Count the models that reached a smaller batch in one layout than in the other, by that layout."""
    batches = {(row.model, row.channels_last): row.batch for row in rows}
    found: Counter[str] = Counter()
    for (model, channels_last), batch in batches.items():
        other = batches.get((model, True), batch)
        if not channels_last and batch != other:
            found["contiguous" if batch < other else "channels_last"] += 1
    return found


def page(answers: Sequence[Answer], rows: Sequence[Row], release: str) -> str:
    """Return the page, with a heading and what explains its tables."""
    count, smaller = len({one.name for one in answers}), smaller_in(rows)
    return f"""# Whether a batch fits, and timm's training benchmark

Written by `python scripts/plans/check_timm_fits.py CONTIGUOUS.csv CHANNELS_LAST.csv ROWS.jsonl -o
docs/benchmarks/timm_fits.md`, {made()}, torch {torch.__version__}, timm {release}, on a CPU. Nothing is
fitted.

timm trained each model on an RTX 3090 (torch 1.12, CUDA 11.3, amp, SGD) with a batch of {FIRST_BATCH}, and
after each failure with the next smaller of a series (512, 384, 256, 192, ...). So a row of its two tables
answers two questions: this batch ran, and the next larger did not. {count} of {len(rows)} rows were drawn by
chance: {len(answers)} questions. Verdict and chance are those of `mpt plan FILE.py:FUNCTION --gpu rtx3090`
for the benchmark's step, with the habits of that release: gradients filled with zeros, an optimizer without
foreach, timm's networks of that time. Close are questions whose plan takes {CLOSE[0]:.0%} to {CLOSE[1]:.0%}
of the card.

The context is that of the release. Until CUDA 11.7 all kernels were loaded at once: 1,687 MiB were in use on
an RTX 3090 after one tensor was made with CUDA 11.1
([pytorch#55277](https://github.com/pytorch/pytorch/issues/55277)). Since torch 1.13 they are loaded when they
are first used ([#86509](https://github.com/pytorch/pytorch/pull/86509)), and `mpt plan` assumes
{CONTEXT_BYTES // MIB} MiB. The second pair of tables has this context. That the release's was looked for is
owed to the first rows that were planned, which stopped to run more than a GiB early; its size is not.

What the tensors do not explain is mostly convolutions in contiguous layout. In timm's tables {smaller["contiguous"]}
models reached a smaller batch there than in channels_last, {smaller["channels_last"]} a larger one, and their
tensors are as large. cuDNN's kernels for float16 work in channels_last and have to copy, and the benchmark
let cuDNN time its kernels (`torch.backends.cudnn.benchmark`), whatever workspace they take. The tables do not
say which of both made a batch fail. Nor do they say that it was memory: `sequencer2d_s` did not run with 192
in channels_last, with which the larger `sequencer2d_m` ran, and `resnetv2_101x1_bitm` stopped to run at two
thirds of the card in both layouts.

{report(answers)}
"""


def main() -> None:
    """Plan a sample of the rows, and print or save the tables."""
    parser = described(__doc__)
    parser.add_argument("contiguous", type=Path)
    parser.add_argument("channels_last", type=Path)
    parser.add_argument("answers", type=Path, help="JSON lines, which are added to")
    parser.add_argument(
        "--sample", type=int, default=0, help="plan that many rows, drawn by seed 0"
    )
    parser.add_argument("-o", "--output", type=Path, help="write a page in Markdown")
    arguments = parser.parse_args()
    preload()
    import_torchvision("models")
    import timm

    rows = [*read(arguments.contiguous, False), *read(arguments.channels_last, True)]
    order = random.Random(0).sample(rows, len(rows))  # a larger sample continues a smaller one
    plan_rows(order[: arguments.sample], arguments.answers)
    answers = load(arguments.answers)
    print(report(answers))
    if arguments.output:
        arguments.output.write_text(page(answers, rows, timm.__version__), "utf-8")


if __name__ == "__main__":
    main()
