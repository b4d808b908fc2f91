"""More loops of `loops.py`: those that users of Lightning, TRL, GANs, reinforcement learning, diffusion and meta-learning write.

Each was written from the README alone, as it would be written around a plain optimizer; `run.whole` is what the README says of weights.
"""

from __future__ import annotations

import copy
import io
import math
import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

# `loops.py` runs this file, under the name that the ranks of a pool know it by.
LOOPS: Any = sys.modules["zero_loops"]
ROWS, STEPS, WIDTH, LoopNet, Run = LOOPS.ROWS, LOOPS.STEPS, LOOPS.WIDTH, LOOPS.LoopNet, LOOPS.Run
everywhere, loop, sharded = LOOPS.everywhere, LOOPS.loop, LOOPS.sharded

WRITES = {3: "sharded-access"}


def optimizer_of(run: Run, model: nn.Module, **options: float) -> torch.optim.Optimizer:
    return run.wrap(model, torch.optim.AdamW(model.parameters(), **{"lr": 1e-2, **options}))


# ---- reinforcement learning


@loop({3: "torch: size mismatch"}, ranks=(2,))
def target_network_copied(run: Run) -> None:
    """DQN: `target.load_state_dict(model.state_dict())` every second step, as it is."""
    model, target = run.net(), LoopNet(1)
    optimizer = optimizer_of(run, model)
    for step in range(STEPS):
        if step % 2 == 0:
            target.load_state_dict(model.state_dict())
        with torch.no_grad():
            value = run.x(step).sum(1) + 0.9 * target(run.x(step + 20)).max(1).values
        chosen = model(run.x(step)).gather(1, torch.zeros(len(value), 1, dtype=torch.long)).squeeze(1)
        optimizer.zero_grad()
        functional.smooth_l1_loss(chosen, value).backward()
        nn.utils.clip_grad_value_(model.parameters(), 100)
        optimizer.step()
    run.models.append(target)


@loop()
def target_network_copied_whole(run: Run) -> None:
    """DQN: the same inside `GatheredParameters`."""
    model, target = run.net(), LoopNet(1)
    optimizer = optimizer_of(run, model)
    for step in range(STEPS):
        with run.whole(model):
            target.load_state_dict(model.state_dict())
        with torch.no_grad():
            value = target(run.x(step + 20)).max(1).values
        optimizer.zero_grad()
        functional.mse_loss(model(run.x(step)).max(1).values, value).backward()
        optimizer.step()
    run.models.append(target)


@loop()
def polyak_by_data(run: Run) -> None:
    """Soft update of a target by `.data`: `t.data.mul_(0.9); t.data.add_(0.1 * p.data)`, inside `GatheredParameters`."""
    model, target = run.net(), LoopNet(1)
    optimizer = optimizer_of(run, model)
    for step in range(STEPS):
        optimizer.zero_grad()
        run.loss(model, step).backward()
        optimizer.step()
        with run.whole(model):
            for t, p in zip(target.parameters(), model.parameters(), strict=True):
                t.data.mul_(0.9)
                t.data.add_(0.1 * p.data)
    run.models.append(target)


@loop()
def ppo_epochs(run: Run) -> None:
    """PPO: several epochs over one batch, a clipped ratio to old outputs, `clip_grad_norm_`."""
    model = run.net()
    optimizer = optimizer_of(run, model)
    for step in range(2):
        x = run.x(step)
        with torch.no_grad():
            old = model(x).log_softmax(1)
        for _ in range(3):
            ratio = (model(x).log_softmax(1) - old).exp()[:, 0]
            gain = x[:, 0]
            loss = -torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            run.numbers.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
            optimizer.step()


@loop()
def actor_critic(run: Run) -> None:
    """Actor and critic with an optimizer each; the critic is frozen by `requires_grad_(False)` while the actor learns through it."""
    actor, critic = run.net(0), run.net(1)
    for_actor, for_critic = optimizer_of(run, actor), optimizer_of(run, critic)
    widen = torch.linspace(-1.0, 1.0, 3 * WIDTH).view(3, WIDTH)
    for step in range(STEPS):
        for_critic.zero_grad()
        run.loss(critic, step).backward()
        for_critic.step()
        for param in critic.parameters():
            param.requires_grad_(False)
        for_actor.zero_grad()
        critic(actor(run.x(step)) @ widen).square().mean().backward()
        for_actor.step()
        for param in critic.parameters():
            param.requires_grad_(True)


# ---- generative models


@loop(WRITES, ranks=(2,))
def weight_clipping_by_data(run: Run) -> None:
    """WGAN: `p.data.clamp_(-0.1, 0.1)` after each step, as it is."""
    model = run.net()
    optimizer = optimizer_of(run, model)
    for step in range(STEPS):
        optimizer.zero_grad()
        run.loss(model, step).backward()
        optimizer.step()
        for param in model.parameters():
            param.data.clamp_(-0.1, 0.1)


@loop({1: "zero-unpublished-weights", 2: "zero-unpublished-weights", 3: "zero-unpublished-weights"}, ranks=(2,))
def weight_clipping_of_groups(run: Run) -> None:
    """`p.clamp_` over `optimizer.param_groups` after each step, as it is."""
    model = run.net()
    optimizer = optimizer_of(run, model)
    for step in range(STEPS):
        optimizer.zero_grad()
        run.loss(model, step).backward()
        optimizer.step()
        with torch.no_grad():
            for group in optimizer.param_groups:
                for param in group["params"]:
                    param.clamp_(-0.1, 0.1)


@loop()
def r1_penalty(run: Run) -> None:
    """A GAN's R1 penalty: the squared gradient of the output by real inputs, every second step."""
    model = run.net()
    optimizer = optimizer_of(run, model)
    for step in range(STEPS):
        x = run.x(step).requires_grad_(step % 2 == 0)
        out = model(x)
        loss = functional.softplus(-out).mean()
        if step % 2 == 0:
            (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
            loss = loss + 5.0 * grad.square().sum(1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@loop()
def diffusion_with_average(run: Run) -> None:
    """Diffusion: noise of a seed, an average of weights by `torch._foreach_lerp_`, evaluation with the average."""
    model, average = run.net(), LoopNet()
    optimizer = optimizer_of(run, model)
    for step in range(STEPS):
        noise = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(100 + step))
        noise = noise.chunk(run.size)[run.rank]
        loss = functional.mse_loss(model(run.x(step) + noise), noise[:, :3])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        with run.whole(model), torch.no_grad():
            torch._foreach_lerp_(list(average.parameters()), [p.detach() for p in model.parameters()], 0.2)
    run.models.append(average)


@loop()
def momentum_encoder(run: Run) -> None:
    """MoCo: `copy.deepcopy(model)` before the start, averaged with the model inside `GatheredParameters`, a queue of its outputs."""
    model = run.net()
    keys = copy.deepcopy(model)
    optimizer = optimizer_of(run, model)
    queue: list[Tensor] = []
    for step in range(STEPS):
        with run.whole(model), torch.no_grad():
            for k, q in zip(keys.parameters(), model.parameters(), strict=True):
                k.mul_(0.9).add_(q, alpha=0.1)
        with torch.no_grad():
            queue.append(keys(run.x(step)).tanh())
        loss = sum((model(run.x(step)).tanh() - key).square().mean() for key in queue[-2:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


# ---- meta-learning


@loop()
def maml(run: Run) -> None:
    """MAML: an inner step by `torch.autograd.grad(create_graph=True)`, `functional_call` with the fast weights, a second derivative."""
    model = run.net()
    optimizer = optimizer_of(run, model)
    for step in range(STEPS):
        optimizer.zero_grad()
        tasks = list(zip(run.tasks(step), run.tasks(step + 10), strict=True))
        with run.whole(model):
            params = dict(model.named_parameters())
            for support, query in tasks:
                inner = torch.func.functional_call(model, params, (support,)).square().mean()
                grads = torch.autograd.grad(inner, list(params.values()), create_graph=True)
                fast = {name: p - 0.1 * g for (name, p), g in zip(params.items(), grads, strict=True)}
                (torch.func.functional_call(model, fast, (query,)).square().mean() / len(tasks)).backward()
        optimizer.step()


@loop()
def reptile(run: Run) -> None:
    """Reptile: weights kept, two inner steps, then weights moved towards the result inside `GatheredParameters(write=True)`."""
    model = run.net()
    optimizer = run.wrap(model, torch.optim.SGD(model.parameters(), lr=0.05))
    for step in range(2):
        with run.whole(model):
            before = [p.detach().clone() for p in model.parameters()]
        for inner in range(2):
            optimizer.zero_grad()
            run.loss(model, 10 * step + inner).backward()
            optimizer.step()
        with run.whole(model, write=True), torch.no_grad():
            for param, old in zip(model.parameters(), before, strict=True):
                param.copy_(old + 0.5 * (param - old))


@loop()
def several_tasks_weighted(run: Run) -> None:
    """GradNorm: `torch.autograd.grad` of each task's loss by one shared weight, `retain_graph`, then a weighted sum."""
    model = run.net()
    optimizer = optimizer_of(run, model)
    for step in range(STEPS):
        out = model(run.x(step))
        losses = [out[:, i].square().mean() for i in range(2)]
        norms = []
        for one in losses:
            (grad,) = torch.autograd.grad(one, [model.head.weight], retain_graph=True)
            if run.size > 1:
                torch.distributed.all_reduce(grad)
            norms.append((grad / run.size).norm())
        weights = torch.stack(norms)
        weights = weights / weights.sum()
        optimizer.zero_grad()
        sum(w * one for w, one in zip(weights, losses, strict=True)).backward()
        optimizer.step()
        run.numbers.extend(weights.tolist())


# ---- trainers


@loop()
def trainer_step(run: Run) -> None:
    """The Trainer's inner loop: accumulation, clipping, a warm-up of two groups, `model.zero_grad`, the norm logged."""
    model = run.net()
    decay = [p for n, p in model.named_parameters() if not n.endswith("bias")]
    rest = [p for n, p in model.named_parameters() if n.endswith("bias")]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = run.wrap(model, torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95)))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min(1.0, (n + 1) / 3))
    model.zero_grad()
    for micro in range(2 * STEPS):
        (run.loss(model, micro) / 2).backward()
        if micro % 2:
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            model.zero_grad()
            run.numbers.append(norm.item())
            run.numbers.append(scheduler.get_last_lr()[0])


@loop()
def lightning_toggle(run: Run) -> None:
    """Lightning's manual optimization: two optimizers, `requires_grad` of the other model's parameters switched off and on."""
    first, second = run.net(0), run.net(1)
    ways = [optimizer_of(run, first), optimizer_of(run, second)]
    for step in range(STEPS):
        trained, other = (first, second) if step % 2 else (second, first)
        for param in other.parameters():
            param.requires_grad = False
        loss = (trained(run.x(step)) - other(run.x(step))).square().mean()
        ways[1 - step % 2].zero_grad()
        loss.backward()
        ways[1 - step % 2].step()
        for param in other.parameters():
            param.requires_grad = True


@loop()
def preference(run: Run) -> None:
    """DPO: a frozen copy as reference, the log-sigmoid of differences, a rate of 1e-6 that warms up."""
    model = run.net()
    reference = copy.deepcopy(model).requires_grad_(False)
    optimizer = optimizer_of(run, model, lr=1e-6)
    for step in range(STEPS):
        good, bad = run.x(step), run.x(step + 50)
        with torch.no_grad():
            base_margin = reference(good)[:, 0] - reference(bad)[:, 0]
        margin = model(good)[:, 0] - model(bad)[:, 0]
        optimizer.zero_grad()
        (-functional.logsigmoid(0.1 * (margin - base_margin)).mean() * 100).backward()
        optimizer.step()
        optimizer.param_groups[0]["lr"] *= 10


@loop()
def tokens_counted(run: Run) -> None:
    """A loss summed over tokens and divided by the number of all ranks' tokens; gradients multiplied back by the ranks."""
    model = run.net()
    optimizer = optimizer_of(run, model)
    for step in range(STEPS):
        x = run.x(step)
        mask = (x[:, 0] > 0).float()
        count = mask.sum()
        if run.size > 1:
            torch.distributed.all_reduce(count)
        loss = (model(x).square().mean(1) * mask).sum() / count.clamp(min=1)
        (loss * run.size).backward()
        optimizer.step()
        optimizer.zero_grad()


@loop()
def layerwise_rates(run: Run) -> None:
    """A group for each parameter, rates that fall with depth, an own schedule for each (`LambdaLR` with a list)."""
    model = run.net()
    groups = [{"params": [p], "lr": 1e-2 * 0.8**i} for i, p in enumerate(model.parameters())]
    optimizer = run.wrap(model, torch.optim.AdamW(groups))
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, [lambda n, i=i: 0.9 ** (n * i) for i in range(len(groups))]
    )
    for step in range(STEPS):
        run.loss(model, step).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        run.numbers.extend(group["lr"] for group in optimizer.param_groups)


# ---- gradients


@loop()
def gradient_centralisation(run: Run) -> None:
    """`p.register_hook(lambda g: g - g.mean(1, keepdim=True))` on matrices."""
    model = run.net()
    for param in model.parameters():
        if param.dim() > 1:
            param.register_hook(lambda g: g - g.mean(1, keepdim=True))
    optimizer = optimizer_of(run, model)
    for step in range(STEPS):
        optimizer.zero_grad()
        run.loss(model, step).backward()
        optimizer.step()


@loop()
def masked_gradients(run: Run) -> None:
    """`p.grad.mul_(mask)` with a whole mask, then the same mask on the weights inside `GatheredParameters(write=True)`."""
    model = run.net()
    masks = [(torch.arange(p.numel()).view(p.shape) % 3 > 0).float() for p in model.parameters()]
    optimizer = optimizer_of(run, model)
    for step in range(STEPS):
        optimizer.zero_grad()
        run.loss(model, step).backward()
        for param, mask in zip(model.parameters(), masks, strict=True):
            param.grad.mul_(mask)
        optimizer.step()
        with run.whole(model, write=True), torch.no_grad():
            for param, mask in zip(model.parameters(), masks, strict=True):
                param.mul_(mask)


@loop()
def backward_of_some(run: Run) -> None:
    """`loss.backward(inputs=list(model.head.parameters()))`: only the head gets gradients."""
    model = run.net()
    optimizer = optimizer_of(run, model)
    for step in range(STEPS):
        optimizer.zero_grad()
        run.loss(model, step).backward(inputs=list(model.head.parameters()) if step % 2 else None)
        optimizer.step()


@loop()
def several_losses(run: Run) -> None:
    """`torch.autograd.backward([first, second])`, and a sum of `p.norm()` of outputs as a penalty."""
    model = run.net()
    optimizer = optimizer_of(run, model)
    for step in range(STEPS):
        first, second = run.loss(model, step), run.loss(model, step + 7)
        optimizer.zero_grad()
        torch.autograd.backward([first, second])
        optimizer.step()


@loop()
def clip_in_two_calls(run: Run) -> None:
    """`get_total_norm`, `clip_grads_with_norm_`, and `clip_grad_norm_(error_if_nonfinite=True)`."""
    model = run.net()
    optimizer = optimizer_of(run, model)
    for step in range(STEPS):
        optimizer.zero_grad()
        run.loss(model, step).backward()
        params = list(model.parameters())
        total = nn.utils.get_total_norm([p.grad for p in params if p.grad is not None])
        nn.utils.clip_grads_with_norm_(params, 0.1, total)
        run.numbers += [float(total), float(nn.utils.clip_grad_norm_(params, 0.05, error_if_nonfinite=True))]
        optimizer.step()


@loop()
def adaptive_clipping(run: Run) -> None:
    """AutoClip: the quantile of past norms is the next limit."""
    model = run.net()
    optimizer = optimizer_of(run, model)
    history: list[float] = []
    for step in range(STEPS):
        optimizer.zero_grad()
        run.loss(model, step).backward()
        squares = [p.grad.data.norm(2).item() ** 2 for p in model.parameters() if p.grad is not None]
        history.append(math.sqrt(sum(squares)))
        nn.utils.clip_grad_norm_(model.parameters(), sorted(history)[len(history) // 2])
        optimizer.step()
    run.numbers += history


@loop(sharded("sharded-gradient"))
def unitwise_clipping(run: Run) -> None:
    """AGC (NFNets): rows of gradients clipped by the norms of rows of weights, inside `GatheredParameters`."""
    model = run.net()
    optimizer = optimizer_of(run, model)
    for step in range(STEPS):
        optimizer.zero_grad()
        run.loss(model, step).backward()
        with run.whole(model):
            for param in model.parameters():
                limit = 0.01 * param.detach().flatten(1 if param.dim() > 1 else 0).norm(dim=-1, keepdim=True).clamp(
                    min=1e-3
                )
                norm = param.grad.norm(dim=-1, keepdim=True).clamp(min=1e-6)
                param.grad.mul_((limit / norm).clamp(max=1.0))
        optimizer.step()


@loop()
def loss_scaled_by_hand(run: Run) -> None:
    """A scale by hand: `(loss * 128).backward()`, `p.grad.div_(128)`, a step that is left out where one gradient is not finite."""
    model = run.net()
    optimizer = optimizer_of(run, model)
    for step in range(STEPS):
        optimizer.zero_grad()
        (run.loss(model, step) * 128 * (math.nan if step == 1 else 1.0)).backward()
        finite = all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
        for param in model.parameters():
            param.grad.div_(128)
        if finite:
            optimizer.step()
        run.numbers.append(float(finite))


# ---- weights


@loop()
def lookahead_by_hand(run: Run) -> None:
    """Lookahead: slow weights, averaged every second step inside `GatheredParameters(write=True)`."""
    model = run.net()
    optimizer = optimizer_of(run, model)
    with run.whole(model):
        slow = [p.detach().clone() for p in model.parameters()]
    for step in range(STEPS):
        optimizer.zero_grad()
        run.loss(model, step).backward()
        optimizer.step()
        if step % 2:
            with run.whole(model, write=True), torch.no_grad():
                for kept, param in zip(slow, model.parameters(), strict=True):
                    kept.lerp_(param, 0.5)
                    param.copy_(kept)


@loop()
def adversarial_weights(run: Run) -> None:
    """FGM: one weight moved along its gradient, a second backward that adds, the weight put back."""
    model = run.net()
    optimizer = optimizer_of(run, model)
    for step in range(STEPS):
        optimizer.zero_grad()
        run.loss(model, step).backward()
        grad = run.full(model.a.weight.grad).clone()
        with run.whole(model, write=True), torch.no_grad():
            kept = model.a.weight.detach().clone()
            model.a.weight.add_(0.1 * grad / grad.norm())
        run.loss(model, step).backward()
        with run.whole(model, write=True), torch.no_grad():
            model.a.weight.copy_(kept)
        optimizer.step()


@loop(WRITES, ranks=(2,))
def parameters_as_a_vector(run: Run) -> None:
    """`parameters_to_vector` and `vector_to_parameters` between steps, as they are."""
    model = run.net()
    optimizer = optimizer_of(run, model)
    for step in range(STEPS):
        optimizer.zero_grad()
        run.loss(model, step).backward()
        optimizer.step()
        vector = nn.utils.parameters_to_vector(model.parameters()).detach()
        nn.utils.vector_to_parameters(vector * 0.99, model.parameters())


@loop(WRITES, ranks=(2,))
def weights_logged(run: Run) -> None:
    """`p.norm()` and `p.abs().mean()` of weights, logged each step, as they are."""
    model = run.net()
    optimizer = optimizer_of(run, model)
    for step in range(STEPS):
        optimizer.zero_grad()
        run.loss(model, step).backward()
        optimizer.step()
        run.numbers.extend(float(p.detach().norm()) for p in model.parameters())


@loop()
def reset_a_layer(run: Run) -> None:
    """`reset_parameters()` of one layer between steps, inside `GatheredParameters(write=True)`, with a seed."""
    model = run.net()
    optimizer = optimizer_of(run, model)
    for step in range(STEPS):
        optimizer.zero_grad()
        run.loss(model, step).backward()
        optimizer.step()
        if step == 1:
            torch.manual_seed(9)
            with run.whole(model, write=True):
                model.head.reset_parameters()


@loop()
def weight_norm(run: Run) -> None:
    """A layer with `torch.nn.utils.parametrizations.weight_norm`."""
    model = run.net()
    nn.utils.parametrizations.weight_norm(model.b)
    optimizer = optimizer_of(run, model)
    for step in range(STEPS):
        optimizer.zero_grad()
        run.loss(model, step).backward()
        optimizer.step()


@loop()
def best_weights(run: Run) -> None:
    """Early stopping: the best `state_dict()` kept and loaded at the end, inside `GatheredParameters`."""
    model = run.net()
    optimizer = optimizer_of(run, model)
    for step in range(STEPS):
        optimizer.zero_grad()
        run.loss(model, step).backward()
        optimizer.step()
        if step == 1:
            with run.whole(model):
                best = copy.deepcopy(model.state_dict())
    with run.whole(model, write=True):
        model.load_state_dict(best)


# ---- state of the optimizer


@loop()
def resume_by_hand(run: Run) -> None:
    """`torch.save(optimizer.state_dict())` and weights by hand, loaded into a new model and optimizer."""
    model = run.net()
    optimizer = optimizer_of(run, model)
    for step in range(2):
        optimizer.zero_grad()
        run.loss(model, step).backward()
        optimizer.step()
    file = io.BytesIO()
    with run.whole(model):
        weights = copy.deepcopy(model.state_dict())
    torch.save({"model": weights, "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=False)
    again = run.net(5)
    again.load_state_dict(saved["model"])
    other = optimizer_of(run, again)
    other.load_state_dict(saved["optimizer"])
    for step in range(2, 4):
        other.zero_grad()
        run.loss(again, step).backward()
        other.step()


@loop(everywhere("zero-inner-step"))
def inner_optimizer_stepped(run: Run) -> None:
    """`shard(model, optimizer)`, and `optimizer.step()` of the one that was given."""
    model = run.net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run.wrap(model, optimizer)
    run.loss(model, 0).backward()
    optimizer.step()


@loop(everywhere("zero-state-of-parameters"))
def moments_logged(run: Run) -> None:
    """`optimizer.state[p]["exp_avg"].norm()` of the model's parameters, logged."""
    model = run.net()
    optimizer = optimizer_of(run, model)
    for step in range(STEPS):
        optimizer.zero_grad()
        run.loss(model, step).backward()
        optimizer.step()
        run.numbers.extend(float(optimizer.state[p]["exp_avg"].norm()) for p in model.parameters())


@loop()
def state_forgotten(run: Run) -> None:
    """`optimizer.state.clear()` between phases: moments begin anew."""
    model = run.net()
    optimizer = optimizer_of(run, model)
    for step in range(STEPS):
        if step == 2:
            optimizer.state.clear()
        optimizer.zero_grad()
        run.loss(model, step).backward()
        optimizer.step()


@loop()
def rate_finder(run: Run) -> None:
    """A rate finder: rates that grow by 2 each step, then weights put back, rates put back, and training."""
    model = run.net()
    optimizer = run.wrap(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    with run.whole(model):
        kept = copy.deepcopy(model.state_dict())
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = 1e-3 * 2**step
        optimizer.zero_grad()
        run.loss(model, step).backward()
        optimizer.step()
    with run.whole(model, write=True):
        model.load_state_dict(kept)
    optimizer.param_groups[0]["lr"] = 1e-2
    optimizer.zero_grad()
    run.loss(model, 9).backward()
    optimizer.step()


@loop()
def temperature_outside(run: Run) -> None:
    """A learned temperature (CLIP, SAC) that is in the optimizer and in no module of the model, clipped with it."""
    model, temperature = run.net(), nn.Parameter(torch.ones(()))
    params = [*model.parameters(), temperature]
    optimizer = run.wrap(model, torch.optim.AdamW(params, lr=1e-2))
    for step in range(STEPS):
        optimizer.zero_grad()
        (model(run.x(step)) * temperature.exp()).square().mean().backward()
        run.numbers.append(nn.utils.clip_grad_norm_(params, 0.1).item())
        run.numbers.append(float(temperature.grad.norm()))
        optimizer.step()
        run.numbers.append(temperature.item())


@loop()
def loss_with_parameters(run: Run) -> None:
    """A loss with weights of its own, in a group of its own (ArcFace, uncertainty weighting); its state dict is saved."""
    model = run.net()
    torch.manual_seed(5)
    criterion = nn.Linear(3, 4)
    groups = [{"params": model.parameters()}, {"params": criterion.parameters(), "lr": 0.05, "weight_decay": 0.0}]
    optimizer = run.wrap(model, torch.optim.AdamW(groups, lr=1e-2))
    for step in range(STEPS):
        criterion(model(run.x(step))).logsumexp(1).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        run.numbers.extend(float(value.double().sum()) for value in criterion.state_dict().values())
    saved = copy.deepcopy(optimizer.state_dict())
    for step in range(STEPS):
        optimizer.load_state_dict(copy.deepcopy(saved))
        criterion(model(run.x(step))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    run.numbers.extend(criterion.weight.flatten().tolist())


@loop()
def group_from_outside_added(run: Run) -> None:
    """`optimizer.add_param_group` of a head that is in no module of the model, after two steps; accumulation."""
    model, optimizer = run.pair()
    torch.manual_seed(6)
    head = nn.Linear(3, 2)
    for step in range(STEPS):
        if step == 2:
            optimizer.add_param_group({"params": list(head.parameters()), "lr": 0.2})
        for micro in range(2):
            (head(model(run.x(10 * step + micro))).square().mean() * 10).backward()
        if step < 2:
            head.zero_grad()
        optimizer.step()
        optimizer.zero_grad()
    run.numbers.extend([*head.weight.flatten().tolist(), *head.bias.tolist()])


@loop()
def prompt_outside_of_frozen_model(run: Run) -> None:
    """A soft prompt alone is trained, through a frozen model that it is no part of."""
    model = run.net().requires_grad_(False)
    prompt = nn.Parameter(torch.linspace(-1.0, 1.0, WIDTH))
    optimizer = run.wrap(model, torch.optim.Adam([prompt], lr=0.1))
    for step in range(STEPS):
        optimizer.zero_grad()
        run.numbers.append(float(prompt.detach().sum()))
        model(run.x(step) + prompt).square().mean().backward()
        optimizer.step()
    run.numbers.extend(prompt.tolist())


@loop()
def recomputed_layers(run: Run) -> None:
    """`torch.utils.checkpoint.checkpoint` of layers, both ways to recompute, with accumulation."""
    from torch.utils.checkpoint import checkpoint

    model = run.net()
    optimizer = optimizer_of(run, model)
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(2):
            x = run.x(10 * step + micro).requires_grad_()
            hidden = checkpoint(model.a, x, use_reentrant=bool(micro)).tanh()
            hidden = checkpoint(model.b, hidden, use_reentrant=bool(micro)).tanh()
            (model.head(hidden).square().mean() / 2).backward()
        optimizer.step()
