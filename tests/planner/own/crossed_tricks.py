"""Ways from a batch to gradients, as training scripts have them: each returns the loss, if there is one."""

import torch
from torch.autograd import graph
from torch.func import functional_call, grad_and_value, vmap
from torch.nn import functional
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from tests.planner.own.crossed_optimizers import trained


def plain(own):
    loss = own.compute(own.model, *own.batch())
    own.backward(loss)
    return loss


def accumulated(own):
    total = 0.0
    for _ in range(2):
        loss = own.compute(own.model, *own.batch()) / 2
        own.backward(loss)
        total = total + loss.detach()
    return total


def recomputed(use_reentrant):
    def produce(own):
        stem, body, head = own.model

        def forward(inputs):
            return head(checkpoint(body, stem(inputs), use_reentrant=use_reentrant))

        loss = own.compute(forward, *own.batch())
        own.backward(loss)
        return loss

    return produce


def recomputed_in_parts(own):
    def forward(inputs):
        return checkpoint_sequential(own.model, 2, inputs, use_reentrant=False)

    loss = own.compute(forward, *own.batch())
    own.backward(loss)
    return loss


def saved_on_host(own):
    with graph.save_on_cpu(pin_memory=torch.cuda.is_available()):
        loss = own.compute(own.model, *own.batch())
    own.backward(loss)
    return loss


def packed_in_half(own):
    def pack(saved):
        return saved.dtype, saved.half() if saved.dtype == torch.float32 else saved

    with graph.saved_tensors_hooks(pack, lambda pair: pair[1].to(pair[0])):
        loss = own.compute(own.model, *own.batch())
    own.backward(loss)
    return loss


def backward_twice(own):
    loss = own.compute(own.model, *own.batch())
    own.backward(loss, retain_graph=True)
    own.backward(loss)
    return loss


def penalized(own):
    inputs, labels = own.batch()
    with own.context():
        features = own.model[0](inputs)
        if not features.requires_grad:
            features.requires_grad_()
        loss = own.loss(own.model[2](own.model[1](features)), labels)
    (slope,) = torch.autograd.grad(loss, features, create_graph=True)
    loss = loss + 0.1 * slope.float().square().sum()
    own.backward(loss)
    return loss


def gradients_taken(own):
    loss = own.compute(own.model, *own.batch())
    weights = trained(own.model)
    found = torch.autograd.grad(own.scaler.scale(loss), weights)
    for weight, each in zip(weights, found):
        weight.grad = each
    return loss.detach()


def functional_model(own):
    weights = {**dict(own.model.named_parameters()), **dict(own.model.named_buffers())}
    loss = own.compute(lambda inputs: functional_call(own.model, weights, (inputs,)), *own.batch())
    own.backward(loss)
    return loss


def function_gradients(own):
    weights = {name: one for name, one in own.model.named_parameters() if one.requires_grad}

    def compute(weights, inputs, labels):
        loss = own.compute(lambda x: functional_call(own.model, weights, (x,)), inputs, labels)
        return own.scaler.scale(loss)

    plain = {name: one.detach() for name, one in weights.items()}
    own.scaler.scale(torch.zeros((), device=own.device))  # makes its factor, outside
    found, loss = grad_and_value(compute)(plain, *own.batch())
    for name, weight in weights.items():
        weight.grad = found[name].clone()
    return loss


def gradients_of_each(own):
    weights = {name: one for name, one in own.model.named_parameters() if one.requires_grad}

    def compute(weights, inputs, label):
        def forward(x):
            return functional_call(own.model, weights, (x[None],))

        return own.scaler.scale(own.compute(forward, inputs, label[None]))

    plain = {name: one.detach() for name, one in weights.items()}
    own.scaler.scale(torch.zeros((), device=own.device))
    each = vmap(grad_and_value(compute), (None, 0, 0), randomness="different")
    found, losses = each(plain, *own.batch())
    for name, weight in weights.items():
        weight.grad = found[name].mean(0)
    return losses.mean()


def sharpened(own):
    inputs, labels = own.batch()
    own.backward(own.compute(own.model, inputs, labels))
    weights = [weight for weight in trained(own.model) if weight.grad is not None]
    with torch.no_grad():
        before = [weight.clone() for weight in weights]
        for weight in weights:
            weight.add_(weight.grad, alpha=0.01)
    own.model.zero_grad()
    loss = own.compute(own.model, inputs, labels)
    own.backward(loss)
    with torch.no_grad():
        for weight, old in zip(weights, before):
            weight.copy_(old)
    return loss


def replaced_data(own):
    before = [weight.data.clone() for weight in trained(own.model)]
    loss = own.compute(own.model, *own.batch())
    own.backward(loss)
    for weight, old in zip(trained(own.model), before):
        weight.data = old
        weight.data.mul_(0.99)
    return loss


def in_streams(own):
    inputs, labels = own.batch()
    if torch.cuda.is_available():
        other, done = torch.cuda.Stream(), torch.cuda.Event()
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            inputs = inputs.clone()
            inputs.record_stream(other)
            done.record(other)
        torch.cuda.current_stream().wait_event(done)
    else:
        inputs = inputs.clone()
    loss = own.compute(own.model, inputs, labels)
    own.backward(loss)
    return loss


def hooked(own):
    seen = []

    def watch(module, given, found):
        if isinstance(found, torch.Tensor) and found.requires_grad:
            found.register_hook(lambda gradient: gradient * 0.5)
        seen.append(found)

    handles = [module.register_forward_hook(watch) for module in own.model]
    handles.append(own.model[1].register_full_backward_hook(lambda *given: None))
    loss = own.compute(own.model, *own.batch())
    own.backward(loss + sum(one.float().mean() for one in seen))
    for handle in handles:
        handle.remove()
    return loss


def in_place(own):
    def forward(inputs):
        features = own.model[1](own.model[0](inputs) * 1) * 1
        return own.model[2](functional.relu(features.mul_(2).add_(1), inplace=True))

    loss = own.compute(forward, *own.batch())
    own.backward(loss)
    return loss


def tidied(own):
    inputs, labels = own.batch()
    with own.context():
        features = own.model[0](inputs)
        del inputs
        found = own.model[2](own.model[1](features))
        del features
        loss = own.loss(found, labels)
        del found, labels
    own.backward(loss)
    value = loss.item()
    del loss
    return value


def distilled(own):
    """The network teaches itself, as it was without gradients."""
    inputs, _ = own.batch()
    with torch.inference_mode():
        target = own.model(inputs).argmax(-1)
    loss = own.compute(own.model, inputs, target.clone())
    own.backward(loss)
    return loss


def adversarial(own):
    """A critic of the features, and features that please it: two networks and their optimizers in turn."""
    inputs, labels = own.batch()
    with own.context():
        features = own.model[1](own.model[0](inputs))
    own.backward(own.compute(own.model[2], features.detach(), labels))
    own.model[2].zero_grad()
    own.model[2].requires_grad_(False)
    loss = own.compute(own.model[2], features, labels)
    if loss.requires_grad:
        own.backward(-loss)
    own.model[2].requires_grad_(True)
    loss = own.compute(own.model[2], features.detach(), labels)
    own.backward(loss)
    return loss


def continued(own):
    """The state of the last step goes into the next without its graph."""
    inputs, labels = own.batch()
    with own.context():
        features = own.model[1](own.model[0](inputs))
        if getattr(own, "state", None) is not None:
            features = features + 0.1 * own.state
        loss = own.loss(own.model[2](features), labels)
    own.state = features.detach()
    own.backward(loss)
    return loss


def product_with_hessian(own):
    weights = trained(own.model)
    loss = own.compute(own.model, *own.batch())
    slopes = torch.autograd.grad(loss, weights, create_graph=True)
    total = sum((slope * slope.detach()).sum() for slope in slopes)
    own.backward(total)
    return loss.detach()


def frozen_in_turn(own):
    own.turn = not getattr(own, "turn", False)
    own.model[1].requires_grad_(own.turn)
    loss = own.compute(own.model, *own.batch())
    own.backward(loss)
    own.model[1].requires_grad_(True)
    return loss


def watched_for_anomalies(own):
    with torch.autograd.set_detect_anomaly(True):
        return plain(own)


TRICKS = {
    "plain": plain,
    "accumulated": accumulated,
    "recomputed": recomputed(False),
    "recomputed_reentrant": recomputed(True),
    "recomputed_in_parts": recomputed_in_parts,
    "saved_on_host": saved_on_host,
    "packed_in_half": packed_in_half,
    "backward_twice": backward_twice,
    "penalized": penalized,
    "gradients_taken": gradients_taken,
    "functional_model": functional_model,
    "function_gradients": function_gradients,
    "gradients_of_each": gradients_of_each,
    "sharpened": sharpened,
    "replaced_data": replaced_data,
    "in_streams": in_streams,
    "hooked": hooked,
    "in_place": in_place,
    "tidied": tidied,
    "distilled": distilled,
    "adversarial": adversarial,
    "continued": continued,
    "product_with_hessian": product_with_hessian,
    "frozen_in_turn": frozen_in_turn,
    "watched_for_anomalies": watched_for_anomalies,
}
