"""Will it fit into 6 GiB? A plan without a GPU, its patch, and a training with it."""

from pathlib import Path

from telling import mpt, refused, write

write(
    "large.yaml",
    """
    model: {name: small_cnn, image_size: 256, features: 32}
    dataset: {name: shapes, size: 1024}
    train: {epochs: 1, batch_size: 512}
    """,
)
write(
    "small.yaml",
    """
    model: {name: small_cnn, image_size: 32, features: 16}
    dataset: {name: shapes, size: 128}
    optimizer: {name: sgd, lr: 0.1}
    precision: fp32
    train: {steps: 3, batch_size: 64}
    """,
)

said = mpt("plan small.yaml --vram 6GiB", "nothing to change", "no --gpu given")
assert not list(Path().glob("plan*")), "no patch where nothing is to be changed"
refused("plan small.yaml --vram 40MiB --gpu rtx2060 -o never.yaml", "40 MiB", code=7)

mpt(
    "plan large.yaml --vram 6GiB --gpu rtx2060",
    "does not fit",
    "wrote plan.yaml",
    "--with plan.yaml",
)
assert "memory:" in Path("plan.yaml").read_text("utf-8")
# for another training
mpt("plan small.yaml --vram 6GiB --gpu rtx2060 --with plan.yaml", "plan.yaml was planned for")
mpt("train large.yaml --with plan.yaml --dry-run", "micro")
# The same batch in the same micro-batches, of pictures that a test has time for.
mpt(
    "train large.yaml --with plan.yaml model.image_size=16 train.steps=1 train.epochs=null name=fitted",
    "step 1/1",
)
events = (Path("runs") / "fitted" / "config.yaml").read_text("utf-8")
assert "micro_batch:" in events, events
