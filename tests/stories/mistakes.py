"""What a newcomer mistypes in the first week: each is answered in one line that says what to write, and a code."""

from telling import mpt, refused, write

write("mine.yaml", "model: {name: small_cnn, image_size: 16}\ndataset: digits\ntrain: {steps: 2}\n")
write(
    "typo.yaml", "model: {name: small_cnn, image_sise: 16}\ntrain: {stepps: 2, batch_size: many}\n"
)
write("tabs.yaml", "model:\n\tname: small_cnn\n")
write("empty.yaml", "")

said = mpt(
    "train typo.yaml", "image_sise", "did you mean", "stepps", "batch_size", "typo.yaml:2", code=2
)
assert len(said.strip().splitlines()) <= 4, said  # all mistakes at once, a line for each
refused("train tabs.yaml", "tabs.yaml:2", "spaces", code=2)
refused("train empty.yaml", "empty.yaml", code=2)
refused("train lost.yaml", "lost.yaml", code=2)
refused("train @dcgan_ampp", "dcgan_amp", code=2)
refused("train mine.yaml model=resnet50", "torchvision:resnet50", "timm:resnet50", code=2)
refused("train mine.yaml model=timm:resnet5O", "nearest: resnet50", code=2)
refused("train mine.yaml dataset=mnst", "mnist", code=2)
refused("train mine.yaml precision=fp16", "amp (mixed)", "fp16-pure", code=2)
refused("train mine.yaml optimizer=adamm", "adam", code=2)
refused("train mine.yaml --lr 0.1", "optimizer.lr=0.1", code=2)
refused("train mine.yaml --epochs=3", "train.epochs=3", code=2)
refused("train mine.yaml memory=recompute", "memory.recompute=true", code=2)
refused("train mine.yaml optimizer.lr=fast", "optimizer.lr", code=2)
refused("train mine.yaml train.steps=-1", "train.steps", code=2)
refused("train mine.yaml train.device=cuda:7", "cuda", code=2)
refused("train mine.yaml train.device=gpu", "gpu", code=2)
refused(
    "train mine.yaml 'dataset={name: image_folder, root: nowhere}'",
    "no folder nowhere",
    "train/CLASS",
    code=3,
)
refused("infer", "mpt train CONFIG", code=4)
refused("infer runs/lost", "lost", code=4)
refused("compare fp32 amq", "amp", code=2)
refused("plan mine.yaml --vram 6 --gpu rtx2060", "6GiB", code=2)
refused("plan mine.yaml --gpu rtx2O60", "rtx2060", code=2)
refused("report lost", "lost", code=4)
refused("convert --to onx", "onnx", code=2)
refused("list optimisers", "optimizers", code=2)
refused("init --from dcgan mine2.yaml", "dcgan_amp", code=2)
refused("init mine.yaml", "mine.yaml", code=2)
refused(
    "train mine.yaml train.batch_size=100000",
    "1437 samples",
    "train.batch_size to 1437 or less",
    code=3,
)
