import dataclasses

import pytest
import torch

from mpt.config.load import load_config
from mpt.engine.building.build import build_run
from mpt.engine.step.step import update
from mpt.precision import amp
from mpt.precision.fp32 import Settings as Float32Settings
from mpt.precision.fp32 import build as build_float32
from mpt.systems.deepfacelab.data import procedural_faces
from mpt.systems.deepfacelab.metrics.shared.face_swap import overlap, peak_signal_to_noise
from mpt.systems.deepfacelab.nn import saehd
from mpt.systems.deepfacelab.nn.saehd import build as build_networks
from mpt.systems.deepfacelab.optim import adabelief
from mpt.systems.deepfacelab.tasks.face_swap import Settings, build

TINY = {
    "archi": "df-ud",
    "image_size": 64,
    "ae_dims": 8,
    "e_dims": 4,
    "d_dims": 4,
    "d_mask_dims": 2,
}
DATA = procedural_faces.build(procedural_faces.Settings(image_size=64, count=4), "train", 0)
TEST_DATA = procedural_faces.build(
    procedural_faces.Settings(image_size=64, test_count=3), "test", 0
)


def make_task(settings=None, precision=None, spec=DATA.spec, **changes):
    torch.manual_seed(0)
    model_settings = saehd.Settings(**{**TINY, **changes})
    precision = precision or build_float32("fp32", Float32Settings(), torch.device("cpu"))
    return build(
        settings or Settings(),
        model_settings,
        build_networks(model_settings, spec),
        spec,
        precision,
    )


def optimizers_of(task):
    return {
        name: adabelief.build(adabelief.Settings(), list(module.parameters()))
        for name, module in task.trainable.items()
    }


def gradients(task, loss_values):
    task.autoencoder.zero_grad()
    for value in loss_values:
        value.backward()
    return [None if p.grad is None else p.grad.clone() for p in task.autoencoder.parameters()]


def total(losses):
    """The sum of losses that are back-propagated together."""
    return sum(loss.value for loss in losses)


@pytest.mark.parametrize("archi", ["df-ud", "liae-ud"])
def test_both_streams_by_themselves_give_the_gradient_of_both_together(archi):
    task = make_task(archi=archi)
    batch = DATA.fetch([0, 1], 0)
    parts = gradients(task, map(total, task.autoencoder_losses(batch)))
    faces = task.faces
    together = 0
    for side in ("src", "dst"):
        code = getattr(faces, f"encode_{side}")(batch[f"{side}_warped"])
        image, mask = getattr(faces, f"draw_{side}")(code)
        together = together + sum(task.side_losses(image, mask, batch, side).values()).sum()
    for one, other in zip(parts, gradients(task, [together]), strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-3)


def test_losses_are_sums_so_two_halves_of_a_batch_add_up():
    task = make_task()
    batch = DATA.fetch([0, 1], 0)
    whole = [total(losses).item() for losses in task.autoencoder_losses(batch)]
    halves = [0.0, 0.0]
    for index in range(2):
        part = {name: value[index : index + 1] for name, value in batch.items()}
        for number, losses in enumerate(task.autoencoder_losses(part)):
            assert {loss.reduction for loss in losses} == {"sum"}
            halves[number] += total(losses).item()
    assert halves == pytest.approx(whole, rel=1e-5)


def test_the_first_graph_is_gone_before_the_second_is_built():
    task = make_task()
    batch = DATA.fetch([0], 0)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.append(t.grad_fn) or t, lambda t: t
    ):
        stream = task.autoencoder_losses(batch)
        first = next(stream)
        node = first[0].value.grad_fn
        total(first).backward()
        del first
        assert [loss.name for loss in next(stream)] == ["dst_mask", "dst_face"]
    assert not any(
        local is node for local in (stream.gi_frame.f_locals.values() if stream.gi_frame else ())
    )
    assert {"code"} & set(stream.gi_frame.f_locals) == set()


def test_phases_follow_the_powers():
    for powers, names in (
        ({}, ["autoencoder"]),
        (
            {"true_face_power": 0.1, "gan_power": 0.1, "gan_dims": 4, "gan_patch_size": 8},
            ["autoencoder", "code_disc", "patch_disc"],
        ),
    ):
        task = make_task(**powers)
        assert [phase.name for phase in task.phases(optimizers_of(task))] == names


def test_discriminators_change_the_autoencoders_loss_and_learn_without_touching_it():
    batch = DATA.fetch([0, 1], 0)
    plain = total(next(make_task().autoencoder_losses(batch)))
    task = make_task(true_face_power=0.5, gan_power=0.5, gan_dims=4, gan_patch_size=8)
    for losses in task.autoencoder_losses(batch):
        total(losses).backward()
    assert plain != total(next(task.autoencoder_losses(batch)))
    task.autoencoder.zero_grad(set_to_none=True)
    for phase in task.phases(optimizers_of(task))[1:]:
        names = []
        for loss in phase.losses(batch):
            names.append(loss.name)
            assert torch.isfinite(loss.value)
            loss.value.backward()
        assert len(names) == 2
        assert all(p.grad is not None for p in phase.module.parameters())
        assert all(p.grad is None for p in task.autoencoder.parameters())


def test_an_untrained_discriminators_loss_is_near_the_toss_of_a_coin():
    task = make_task(true_face_power=0.5)
    total = sum(loss.value.item() for loss in task.code_disc_losses(DATA.fetch([0, 1], 0)))
    assert total / 2 == pytest.approx(0.693, abs=0.05)


def test_masked_training_ignores_what_is_outside_the_mask():
    batch = DATA.fetch([0], 0)
    changed = dict(batch)
    far = torch.zeros_like(batch["src_target"])
    far[..., :4, :4] = 0.5
    changed["src_target"] = (batch["src_target"] + far).clamp(0, 1)
    for masked in (True, False):
        task = make_task(Settings(masked_training=masked))
        values = [total(next(task.autoencoder_losses(which))).item() for which in (batch, changed)]
        assert (values[0] == values[1]) is masked


def test_a_mask_that_is_not_stretched_weighs_edges_by_half():
    mask = torch.zeros(1, 1, 32, 32)
    mask[..., 16:] = 1
    zeros = torch.zeros(1, 3, 32, 32)
    near = zeros.clone()
    near[..., 15:17] = 1  # the mask's edge
    errors = []
    for stretched in (True, False):
        task = make_task(Settings(stretch_mask=stretched))
        errors.append(task.compare(zeros, mask, mask, near, mask)["face"])
    assert errors[1] < errors[0]


def test_eyes_and_mouth_weigh_when_they_have_priority():
    batch = DATA.fetch([0], 0)
    values = [
        total(next(make_task(Settings(eyes_mouth_priority=on)).autoencoder_losses(batch))).item()
        for on in (False, True)
    ]
    assert values[1] > values[0] + 0.1


def test_losses_are_float32_when_the_drawing_is_half():
    precision = amp.build("bf16", amp.Settings(dtype="bfloat16"), torch.device("cpu"))
    task = make_task(precision=precision)
    batch = DATA.fetch([0], 0)
    with precision.forward():
        code = task.faces.encode_src(batch["src_warped"])
        image, mask = task.faces.draw_src(code)
        assert image.dtype == torch.bfloat16
        found = task.side_losses(image, mask, batch, "src")
    assert {value.dtype for value in found.values()} == {torch.float32}
    expected = task.compare(
        batch["src_target"], batch["src_mask"], batch["src_eyes_mouth"], image.float(), mask.float()
    )
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@torch.no_grad()
def evaluate(task, *batches):
    return task.conclude([task.evaluate_batch(batch) for batch in batches])


def test_evaluation_measures_swaps_only_where_the_true_ones_are_known():
    task = make_task()
    with_truth = evaluate(task, TEST_DATA.fetch([0, 1], 0), TEST_DATA.fetch([2], 0))
    assert {"source_psnr", "swap_psnr", "swap_mask_iou", "destination_mask_iou"} <= set(with_truth)
    batch = {
        name: value
        for name, value in TEST_DATA.fetch([0, 1], 0).items()
        if not name.startswith("swap")
    }
    assert task.metric in evaluate(task, batch)
    assert "swap_psnr" not in evaluate(task, batch)


def test_a_perfect_drawing_scores_in_full():
    images = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    masks = (images[:, :1] > 0.5).float()
    assert peak_signal_to_noise(images, images).tolist() == pytest.approx([100, 100], abs=1e-3)
    assert peak_signal_to_noise(images, images + 0.1)[0].item() == pytest.approx(20, abs=1e-3)
    assert overlap(masks, masks).tolist() == [1, 1]
    assert overlap(masks, 1 - masks).tolist() == [0, 0]
    assert overlap(masks * 0, masks * 0).tolist() == [1, 1]


@torch.no_grad()
def test_a_preview_row_shows_source_destination_swap_and_masks():
    task = make_task(Settings(preview_count=2))
    batch = TEST_DATA.fetch([0, 1, 2], 0)
    tiles = task.preview(batch)
    assert tiles.shape == (2 * task.preview_columns, 3, 64, 64)
    assert torch.equal(tiles[0], batch["src_target"][0])
    assert torch.equal(tiles[task.preview_columns + 2], batch["dst_target"][1])
    assert tiles.min() >= 0
    assert tiles.max() <= 1


@torch.no_grad()
def test_inference_from_pictures_alone_gives_a_swap_and_a_mask_for_each():
    task = make_task()
    result = task.infer({"dst_target": TEST_DATA.fetch([0, 1], 0)["dst_target"]}, 2, 0)
    assert result.outputs.shape == (2, 4, 64, 64)
    assert set(result.figures) == {"swap-0000", "swap-0001", "mask-0000", "mask-0001"}
    assert len(result.tiles) == 2 * result.columns
    whole = task.infer(TEST_DATA.fetch([0, 1], 0), 2, 0)
    torch.testing.assert_close(whole.outputs, result.outputs)
    assert whole.columns == result.columns + 2


def with_extra(**extra):
    return dataclasses.replace(DATA.spec, extra=extra)


def norms(task, batch):
    """The gradients' norm by network after one step's losses."""
    task.autoencoder.zero_grad()
    for losses in task.autoencoder_losses(batch):
        total(losses).backward()
    return {
        name: sum(p.grad.norm().item() for p in network.parameters() if p.grad is not None)
        for name, network in task.autoencoder.named_children()
    }


def test_inter_ab_rests_while_nothing_is_warped_and_stays_the_optimizers():
    batch = DATA.fetch([0, 1], 0)
    warped = norms(make_task(archi="liae-ud", spec=with_extra(random_warp=True)), batch)
    task = make_task(archi="liae-ud", spec=with_extra(random_warp=False))
    unwarped = norms(task, batch)
    assert unwarped["inter_AB"] == 0 < warped["inter_AB"]
    for name in ("encoder", "inter_B", "decoder"):
        assert unwarped[name] == pytest.approx(warped[name])
    assert all(parameter.requires_grad for parameter in task.autoencoder.parameters())
    task.resting.requires_grad_(False)  # as train.freeze does
    norms(task, batch)
    assert not any(parameter.requires_grad for parameter in task.resting.parameters())
    assert norms(make_task(spec=with_extra(random_warp=False)), batch)["inter"] > 0


def test_pretraining_trains_no_discriminator_and_asks_the_code_discriminator_as_it_was_made():
    powers = {"true_face_power": 0.1, "gan_power": 0.1}
    task = make_task(
        Settings(face_style_power=10, bg_style_power=10), spec=with_extra(pretrain=True), **powers
    )
    assert set(task.modules) == {"autoencoder", "code_discriminator"}
    assert [phase.name for phase in task.phases(optimizers_of(task))] == ["autoencoder"]
    groups = list(task.autoencoder_losses(DATA.fetch([0], 0)))
    assert [loss.name for losses in groups for loss in losses] == [
        "src_mask",
        "src_face",
        "src_true_face",
        "dst_mask",
        "dst_face",
    ]
    next(loss.value for loss in groups[0] if loss.name == "src_true_face").backward()
    assert any(p.grad is not None for p in task.autoencoder.parameters())


@pytest.mark.parametrize("archi", ["df-ud", "liae-ud"])
def test_the_style_of_the_face_trains_the_decoder_alone_and_that_of_the_surround_the_encoder_too(
    archi,
):
    batch = DATA.fetch([0, 1], 0)
    for settings, trains_encoder in (
        (Settings(face_style_power=10), False),
        (Settings(bg_style_power=10), True),
    ):
        task = make_task(settings, archi=archi)
        (style,) = list(task.autoencoder_losses(batch))[-1]
        assert style.name == ("background_style" if trains_encoder else "face_style")
        task.autoencoder.zero_grad()
        style.value.backward()
        found = {
            name
            for name, n in task.autoencoder.named_children()
            if any(p.grad is not None for p in n.parameters())
        }
        decoder = "decoder" if archi.startswith("liae") else "decoder_src"
        inter = "inter_AB" if archi.startswith("liae") else "inter"
        assert found == {decoder, *({"encoder", inter} if trains_encoder else ())}


def test_a_blurred_surround_leaves_the_face_and_smooths_the_rest():
    task = make_task(Settings(blur_out_mask=True))
    batch = DATA.fetch([0, 1], 0)
    drawn = task.draw(batch, None)
    mask = batch["src_mask"]
    torch.testing.assert_close(drawn["src_target"] * (mask == 1), batch["src_target"] * (mask == 1))
    noise = torch.rand(batch["src_target"].shape, generator=torch.Generator().manual_seed(0))
    smoothed = task.draw({**batch, "src_target": noise}, None)["src_target"]
    outside = (mask == 0).expand_as(noise)
    assert smoothed[outside].var() < 0.8 * noise[outside].var()
    assert torch.equal(make_task().draw(batch, None)["src_target"], batch["src_target"])


@pytest.mark.parametrize(
    ("precision", "memory"), [("fp32", {}), ("fp32", {"set_to_none": False}), ("O2", {})]
)
def test_inter_ab_at_rest_is_moved_by_no_decay_and_no_momentum(precision, memory):
    sections = {
        "model": {"name": "saehd", **TINY, "archi": "liae-ud"},
        "dataset": "procedural_faces",
        "memory": memory,
    }
    sections |= {
        "optimizer": {"name": "adamw", "weight_decay": 0.1, "lr": 1e-2},
        "precision": precision,
    }
    config = load_config({**sections, "train": {"batch_size": 2, "steps": 1}})
    run = build_run(config, torch.device("cpu"), with_extra(random_warp=False))
    before = {name: p.detach().clone() for name, p in run.task.autoencoder.named_parameters()}
    for _ in range(3):
        update(run, run.phases[0], DATA.fetch([0, 1], 0))
    moved = {
        name.split(".")[0]
        for name, p in run.task.autoencoder.named_parameters()
        if not p.equal(before[name])
    }
    assert moved == {"encoder", "inter_B", "decoder"}
    assert all(parameter.grad is None for parameter in run.task.resting.parameters())
