"""A model, a task, a data set and a metric of one's own, from skeletons, in a folder beside the configuration."""

from pathlib import Path

from telling import mpt, refused, write

for kind, name in (
    ("model", "wide"),
    ("task", "squares"),
    ("dataset", "stripes"),
    ("metric", "hits"),
):
    mpt(f"init --part {kind} {name} --into my-parts", f"{name}.py", "train it with")
    mpt(f"validate my-parts/configs/{name}.yaml --parts my-parts", name)
write(
    "mine.yaml",
    """
    model: {name: wide, features: 32}
    task: squares
    dataset: {name: stripes, size: 64}
    optimizer: {name: adam, lr: 3e-3}
    train: {steps: 40, batch_size: 16}
    name: mine
    """,
)
said = mpt("validate mine.yaml", "my-parts/nn/wide.py is there: add --parts my-parts", code=2)
assert len(said.strip().splitlines()) == 3, said  # the model, the task and the data set
refused("init --part model wide --into my-parts", "wide.py", code=2)  # nothing is written over
mpt("list tasks --parts my-parts", "squares")
mpt("plan mine.yaml --parts my-parts", "mine (wide), batch 16", "needs")
said = mpt("train mine.yaml --parts my-parts", "on 32 test samples", "done: accuracy")
assert float(said.split("done: accuracy ")[1].split()[0]) > 0.9, said
mpt("infer mine --parts my-parts --count 4", "wrote 4 rows", "label standing")

model = Path("my-parts/nn/wide.py").read_text("utf-8")
# wide.py may be imported by now
write("my-parts/nn/broken.py", model.replace("nn.ReLU()", "nn.RELU()"))
said = mpt(
    "train mine.yaml --parts my-parts model.name=broken name=broken", "broken.py", "RELU", code=1
)
assert "site-packages" not in said, said  # its own frames only
assert "mpt infer" not in said, said
