"""Faults of an update: losses, gradients, the optimizer, the weights, and single ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from fault_scene import Inject, Scene, patched, wrap

# -- losses


def divisor_of_micro_batch(scene: Scene) -> None:
    def forward_backward(original: Any, batches: Any, loss: Any, divisor: Any = None) -> Any:
        return original(batches, loss, float(len(batches[0].targets_K)))

    wrap(scene.training.models.trained, "forward_backward", forward_backward)


def policy_loss(**keys: float) -> Inject:
    def inject(scene: Scene) -> None:
        def make_policy_loss(original: Any, algorithm: Any) -> Any:
            return original(algorithm.model_copy(update=keys))

        patched(scene, "lockstep.train.update_terms", "make_policy_loss", make_policy_loss)

    return inject


def kl_coefficient(value: float) -> Inject:
    return lambda scene: scene.training.carried.update(kl_coefficient=value)


def kl_estimator(name: str) -> Inject:
    def inject(scene: Scene) -> None:
        patched(scene, "lockstep.train.update_terms", "divergence", lambda original, _, *rest: original(name, *rest))

    return inject


def preference(**changes: float) -> Inject:
    def inject(scene: Scene) -> None:
        patched(
            scene, "lockstep.methods.pairs", "preference_loss", lambda original, p, **k: original(p, **{**k, **changes})
        )

    return inject


def reference_is_policy(scene: Scene) -> None:
    from lockstep.train.models import Models

    scene.patch.setattr(Models, "reference_logprobs", Models.logprobs)


def value_clip(scene: Scene) -> None:
    patched(
        scene, "lockstep.train.update_terms", "value_loss", lambda original, *args, clip: original(*args, clip=1e-4)
    )


def lost_token(scene: Scene) -> None:
    """One target of the update counts nothing."""
    learner = scene.training.models.trained
    # The policy must not assume equal weights of all targets, as it does for the method's loss.
    learner.module.scoring = replace(learner.module.scoring, alike=False)

    def forward_backward(original: Any, batches: Any, loss: Any, divisor: Any = None) -> Any:
        def less(output: Any, batch: Any) -> Any:
            sums = loss(output, batch)
            return replace(sums, loss=sums.loss + output.logprobs_K[0])

        return original(batches, less, divisor)

    wrap(learner, "forward_backward", forward_backward)


# -- gradients


def put_gradient(optimizer: Any, name: str, gradient: torch.Tensor) -> None:
    """In the place of the one that the next step would take, wherever the optimizer has it."""
    if name in optimizer._grads:
        optimizer._grads[name] = gradient
    else:
        optimizer.trained[name].grad = gradient


def gradients(change: Callable[[str, torch.Tensor], torch.Tensor]) -> Inject:
    """Of the update, after all micro-batches."""

    def inject(scene: Scene) -> None:
        def forward_backward(original: Any, *args: Any) -> Any:
            outcome = original(*args)
            for name in scene.optimizer.trained:
                put_gradient(scene.optimizer, name, change(name, scene.optimizer.gradient(name)))
            return outcome

        wrap(scene.training.models.trained, "forward_backward", forward_backward)

    return inject


def only(name: str, factor: float) -> Callable[[str, torch.Tensor], torch.Tensor]:
    return lambda parameter, gradient: factor * gradient if parameter == name else gradient


def lost_micro_batch(scene: Scene) -> None:
    calls: list[int] = []

    def collect(original: Any) -> None:
        original()
        calls.append(1)
        if len(calls) == 1:
            scene.optimizer.forget()

    wrap(scene.optimizer, "collect", collect)


def summed_in_bf16(scene: Scene) -> None:
    """The sum over micro-batches is kept in bf16, in the place of fp32."""

    def collect(original: Any) -> None:
        original()
        for name in scene.optimizer.trained:
            gradient = scene.optimizer.gradient(name)
            if gradient is not None:
                put_gradient(scene.optimizer, name, gradient.bfloat16().to(gradient.dtype))

    wrap(scene.optimizer, "collect", collect)


def scale_left(scene: Scene) -> None:
    wrap(scene.optimizer, "gradient_norm", lambda original, scale=1.0: original(1.0))


# -- the optimizer


def groups(change: Callable[[dict[str, Any]], None]) -> Inject:
    def inject(scene: Scene) -> None:
        for group in scene.optimizer.adamw.param_groups:
            change(group)

    return inject


def keys(**values: Any) -> Inject:
    return groups(lambda group: group.update(values))


def decay_everywhere(scene: Scene) -> None:
    keys(weight_decay=0.1)(scene)


def no_bias_correction(scene: Scene) -> None:
    adamw = scene.optimizer.adamw

    def step(original: Any) -> None:
        for state in adamw.state.values():
            state["step"] += 10**6
        original()
        for state in adamw.state.values():
            state["step"] -= 10**6

    wrap(adamw, "step", step)


def coupled_decay(scene: Scene) -> None:
    """Adam with decay in the gradient."""
    adamw = scene.optimizer.adamw

    def step(original: Any) -> None:
        for group in adamw.param_groups:
            for weight in group["params"]:
                weight.grad.add_(weight.detach(), alpha=group["weight_decay"])
            group["weight_decay"] = 0.0
        original()

    wrap(adamw, "step", step)


def rate_not_passed_on(scene: Scene) -> None:
    wrap(scene.optimizer, "step", lambda original, lr, norm: original(0.5 * lr, norm))


def wrong_rate(scene: Scene) -> None:
    wrap(scene.training.models.trained, "optim_step", lambda original, lr: original(2 * lr))


def moments_reset(scene: Scene) -> None:
    scene.optimizer.adamw.state.clear()


def other_clip(scene: Scene) -> None:
    scene.optimizer.clip = 0.5


def left_out(name: str) -> Inject:
    """A parameter that the optimizer does not know."""

    def remove(group: dict[str, Any], weight: torch.Tensor) -> None:
        group["params"] = [other for other in group["params"] if other is not weight]

    return lambda scene: groups(lambda group: remove(group, scene.optimizer.trained[name]))(scene)


# -- the weights


def not_written_back(*names: str) -> Inject:
    """Masters move and these parameters do not follow (all of them by default)."""

    def inject(scene: Scene) -> None:
        kept = {name: p for name, p in scene.optimizer.parameters.items() if not names or name in names}

        def step(original: Any, lr: float, norm: torch.Tensor) -> None:
            before = {name: p.detach().clone() for name, p in kept.items()}
            original(lr, norm)
            with torch.no_grad():
                for name, parameter in kept.items():
                    parameter.copy_(before[name])

        wrap(scene.optimizer, "step", step)

    return inject


def weights_lost_after(name: str) -> Inject:
    """After the optimizer's step and its records, a parameter is reset."""

    def inject(scene: Scene) -> None:
        parameter = scene.optimizer.parameters[name]

        def optim_step(original: Any, lr: float) -> Any:
            before = parameter.detach().clone()
            metrics = original(lr)
            with torch.no_grad():
                parameter.copy_(before)
            return metrics

        wrap(scene.training.models.trained, "optim_step", optim_step)

    return inject


def changed_before_next(name: str, factor: float) -> Inject:
    """When the step is over, something writes to a parameter: a save, a validation, an engine that takes weights."""

    def inject(scene: Scene) -> None:
        parameter = scene.optimizer.parameters[name]

        def log(original: Any, *args: Any) -> None:
            original(*args)
            with torch.no_grad():
                parameter.mul_(factor)

        wrap(scene.training.run, "log", log)

    return inject


# -- ranks


def on_rank(rank: int, inject: Inject) -> Inject:
    return lambda scene: inject(scene) if scene.training.run.world.rank == rank else None


def shard_not_written_back(name: str) -> Inject:
    """This rank's rows of a parameter stay where they were."""

    def inject(scene: Scene) -> None:
        local = scene.optimizer.parameters[name].to_local()

        def step(original: Any, lr: float, norm: torch.Tensor) -> None:
            before = local.detach().clone()
            original(lr, norm)
            with torch.no_grad():
                local.copy_(before)

        wrap(scene.optimizer, "step", step)

    return inject


def averaged_over_ranks(scene: Scene) -> None:
    """Losses are divided by what all ranks count, so their gradients must be added up."""
    for module in scene.policy.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(2.0)
