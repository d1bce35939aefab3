"""AdamW, in the place of torch.optim.AdamW."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

import torch

from bastile.identity import identity
from bastile.ops._common import FLOATS
from bastile.ops.optim import AdamWLists, adamw_
from bastile.optim.clip import is_dense, total_norm
from bastile.optim.moments import fresh, kind_of, loaded, local

__all__ = ["AdamW"]

_ROUNDINGS = ("nearest", "stochastic")
_is_contiguous, _device, _dtype = torch.Tensor.is_contiguous, attrgetter("device"), attrgetter("dtype")


class _Options(NamedTuple):
    """What torch's AdamW does not have."""

    max_grad_norm: float | None
    moments: torch.dtype | str | None
    master: bool
    stochastic: bool
    seed: int
    in_backward: bool


class AdamW(torch.optim.AdamW):
    """torch.optim.AdamW in one pass over parameters, gradients and moments: one launch for all tensors of a group.

    Takes torch's arguments, has its parameter groups, hooks, `GradScaler` support and state (`step`, on the
    parameter's device, `exp_avg`, `exp_avg_sq`): a state_dict of either loads into the other. `foreach`, `fused` and
    `capturable` are taken and make no difference: every step is fused, and a CUDA graph can capture it, with `lr` a
    tensor where that is to change. Runs on CPU too, on DDP, and on FSDP2's shards. Computes in float32 and rounds once.

    Args:
        params, lr, betas, eps, weight_decay, maximize, foreach, capturable, fused: torch's.
        amsgrad, differentiable: must be false.
        max_grad_norm: clips the gradients' norm, over all groups, within the step: one more pass reads the gradients,
            none writes them. They stay as they are; `last_grad_norm` is their norm, on the device.
        moments: torch.float32, torch.bfloat16, or "8bit", blocks of 256 with a scale; None: each parameter's type, as
            torch has it.
        master_weights: keeps 16-bit parameters in float32 too, in the state, and trains those.
        rounding: "nearest", or "stochastic": parameters (without master weights) and moments in bfloat16 are rounded up
            or down by chance, so that the mean is right and small updates are not lost. Moments of 8 bits always are.
        seed: of the rounding, which with the step and the tensor's place decides about every bit. The same on all ranks
            that hold the same parameters.
        in_backward: updates each parameter during the backward pass, as soon as its gradient is complete, and frees
            that; `step` then does nothing. Not with max_grad_norm, `GradScaler`, or several backward passes a step.

    Raises:
        ValueError: for what is no option. RuntimeError, TypeError: at the first step, naming the parameter that is of
            another type than float32, bfloat16 or float16, or on another device than CPU or CUDA.
    """

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float | torch.Tensor, float | torch.Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        max_grad_norm: float | None = None,
        moments: torch.dtype | str | None = None,
        master_weights: bool = False,
        rounding: str = "nearest",
        seed: int = 0,
        in_backward: bool = False,
    ) -> None:
        if rounding not in _ROUNDINGS:
            raise ValueError(f'AdamW: rounding is {rounding!r}; "nearest" or "stochastic" is needed')
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise ValueError(f"AdamW: max_grad_norm is {max_grad_norm}; a number above 0, or None, is needed")
        if in_backward and max_grad_norm is not None:
            raise ValueError("AdamW: in_backward does not go with max_grad_norm: no gradient waits for the others'")
        if foreach and fused:
            raise RuntimeError("`fused` and `foreach` cannot be `True` together.")
        self._options = _Options(
            max_grad_norm,
            kind_of(moments),
            bool(master_weights),
            rounding == "stochastic",
            int(seed) & (1 << 63) - 1,
            bool(in_backward),
        )
        self._clip: torch.Tensor | None = None
        self._given: dict[str, Any] | None = None
        #: The norm of all gradients at the last step with max_grad_norm, before clipping; None before the first.
        self.last_grad_norm: torch.Tensor | None = None
        # torch's own checks of `fused` are about its kernels.
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            maximize=maximize,
            foreach=foreach,
            capturable=capturable,
            differentiable=differentiable,
        )
        self.defaults["fused"] = not foreach if fused is None else fused
        for group in self.param_groups:
            group["fused"] = self.defaults["fused"]
        #: GradScaler hands its scale to the step.
        self._step_supports_amp_scaling = True

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            _need_served(group)
        except ValueError:
            self.param_groups.pop()
            raise
        if self._options.in_backward:
            for p in group["params"]:
                if p.requires_grad:
                    p.register_post_accumulate_grad_hook(partial(self._update_now, number=self._number_of(p)))

    def _number_of(self, parameter: torch.Tensor) -> tuple[int, int]:
        """The group of a parameter, and its place among all."""
        place = 0
        for number, group in enumerate(self.param_groups):
            for p in group["params"]:
                if p is parameter:
                    return number, place
                place += 1
        raise KeyError("no parameter of this optimiser")

    # ---- a step ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """A step with the gradients that are there. closure: evaluates the model again and returns the loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._options.in_backward:
            return loss
        clip, self._clip = self._clip, None
        grad_scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        most = self._options.max_grad_norm
        if most is not None:
            gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
            self.last_grad_norm, clip = total_norm(gradients, most, _scalar(grad_scale))
        first = 0
        for group in self.param_groups:
            self._update(group, group["params"], first, grad_scale, found_inf, clip)
            first += len(group["params"])
        return loss

    @torch.no_grad()
    def _update_now(self, parameter: torch.Tensor, number: tuple[int, int]) -> None:
        """In the backward pass: one parameter, whose gradient goes."""
        group, place = number
        self._update(self.param_groups[group], [parameter], place)
        parameter.grad = None

    def _update(
        self,
        group: dict[str, Any],
        parameters: list[torch.Tensor],
        first: int,
        grad_scale: torch.Tensor | None = None,
        found_inf: torch.Tensor | None = None,
        clip: torch.Tensor | None = None,
    ) -> None:
        """The parameters of a group that have a gradient: a call for those of each device and kind of state."""
        calls = self._gathered_at_once(parameters) or self._gathered(parameters)
        beta1, beta2 = group["betas"]
        for (device, _), lists in calls.items():
            lr = group["lr"]
            if isinstance(lr, torch.Tensor):
                lr = lr.reshape(()).to(torch.float32) if lr.device == device else float(lr)
            adamw_(
                lists,
                lr=lr,
                betas=(float(beta1), float(beta2)),
                eps=group["eps"],
                weight_decay=group["weight_decay"],
                maximize=group["maximize"],
                stochastic=self._options.stochastic,
                seed=self._options.seed,
                first_number=first,
                grad_scale=_scalar(grad_scale, device),
                found_inf=_scalar(found_inf, device),
                clip=_scalar(clip, device),
            )
            torch.autograd.graph.increment_version(lists.parameter)

    def _gathered(self, parameters: list[torch.Tensor]) -> dict[tuple[Any, int], AdamWLists]:
        """By device and kind of state; state is made where there is none yet."""
        calls: dict[tuple[Any, int], AdamWLists] = {}
        states, kind, master = self.state, self._options.moments, self._options.master
        for p in parameters:
            g = p.grad
            if g is None:
                continue
            state = states[p]
            if not state:
                self._need(p, g)
                state.update(fresh(p, kind, master))
            key = (p.device, len(state))
            lists = calls.get(key)
            if lists is None:
                lists = calls[key] = AdamWLists(*([] for _ in AdamWLists._fields))
            m, v, step = state["exp_avg"], state["exp_avg_sq"], state["step"]
            full: torch.Tensor | None = state.get("master")
            if type(g) is not torch.Tensor or type(p) is not torch.nn.Parameter:
                p, g, m, v = (local(t) for t in (p, g, m, v))
                full = None if full is None else local(full)
            if not (p.is_contiguous() and g.is_contiguous()):
                g = _beside(p, g, m, v, full)
            lists.parameter.append(p)
            lists.gradient.append(g)
            lists.exp_avg.append(m)
            lists.exp_avg_sq.append(v)
            lists.step.append(step)
            if full is not None:
                lists.master.append(full)
            if m.dtype == torch.uint8:
                lists.exp_avg_scale.append(state["exp_avg_scale"])
                lists.exp_avg_sq_scale.append(state["exp_avg_sq_scale"])
        return calls

    def _gathered_at_once(self, parameters: list[torch.Tensor]) -> dict[tuple[Any, int], AdamWLists] | None:
        """The same without a loop in Python, in a third of the time; None where that does not do: no state yet, a
        gradient that is not there, shards, several devices, other orders in memory."""
        gradients: list[Any] = [p.grad for p in parameters]
        states: list[Any] = list(map(self.state.get, parameters))
        devices = set(map(_device, parameters))
        if not (
            set(map(type, gradients)) == {torch.Tensor}
            and set(map(type, parameters)) == {torch.nn.Parameter}
            and all(states)
            and len(devices) == len({tuple(state) for state in states}) == 1
            and all(map(_is_contiguous, gradients))
            and all(map(_is_contiguous, parameters))
        ):
            return None
        m = list(map(itemgetter("exp_avg"), states))
        if set(map(type, m)) != {torch.Tensor} or len({dtype is torch.uint8 for dtype in map(_dtype, m)}) != 1:
            return None
        rest = [list(map(itemgetter(name), states)) if name in states[0] else [] for name in AdamWLists._fields[3:]]
        return {(devices.pop(), len(states[0])): AdamWLists(list(parameters), gradients, m, *rest)}

    def _need(self, p: torch.Tensor, g: torch.Tensor) -> None:
        if g.layout is not torch.strided:
            raise RuntimeError(
                f"AdamW: the gradient of a parameter of shape {list(p.shape)} is {g.layout}; a dense one is needed"
            )
        if not serves(p):
            raise TypeError(
                f"AdamW: a parameter of shape {list(p.shape)} is {p.dtype} on {p.device.type}; float32, bfloat16 or "
                "float16 on cpu or cuda is needed: torch.optim.AdamW takes others"
            )

    # ---- clipping ----------------------------------------------------------------------------------------------------

    def clip_next_step(self, coefficient: torch.Tensor) -> None:
        """The next step multiplies all gradients with one float32, as `clip_grad_norm_(optimizer=)` wants it."""
        self._clip = coefficient

    def has_exactly(self, parameters: Iterable[torch.Tensor]) -> bool:
        """Whether the parameters with a gradient are this optimiser's."""
        if self._options.in_backward:
            return False
        given, own = list(parameters), [p for group in self.param_groups for p in group["params"]]
        if set(map(identity, given)) == set(map(identity, own)):  # seen sooner than each one's gradient
            return True
        having, its = ([p for p in some if p.grad is not None] for some in (given, own))
        return set(map(identity, having)) == set(map(identity, its))

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._clip = None
        super().zero_grad(set_to_none)

    # ---- saving and loading ------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_options": self._options, "_clip": None, "_given": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._step_supports_amp_scaling = True
        self.__dict__.setdefault("last_grad_norm", None)
        given = self._given
        if given is None:
            return
        # torch has made all of a state the parameter's type; here each part has its own.
        saved = [number for group in given["param_groups"] for number in group["params"]]
        own = [p for group in self.param_groups for p in group["params"]]
        for number, p in zip(saved, own, strict=True):
            if number in given["state"]:
                self.state[p] = loaded(p, given["state"][number], self._options.moments, self._options.master)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """torch's, of a torch.optim.AdamW's or of this one's, whatever its moments: they are turned into this one's
        type. ValueError for one of amsgrad: its further moment would be left out in silence."""
        for group in state_dict["param_groups"]:
            _need_served(group)

        def keep(_: torch.optim.Optimizer, given: dict[str, Any]) -> None:
            self._given = given

        hook = self.register_load_state_dict_pre_hook(keep)
        try:
            super().load_state_dict(state_dict)
        finally:
            hook.remove()
            self._given = None


#: Options of torch's AdamW that this one does not have.
TORCHS_ALONE = ("amsgrad", "differentiable")


def _need_served(group: dict[str, Any]) -> None:
    for name in TORCHS_ALONE:
        if group.get(name):
            raise ValueError(f"AdamW: {name} is {group[name]}; torch.optim.AdamW alone has it")


def serves(parameter: torch.Tensor) -> bool:
    """Whether its type and device are those of a kernel."""
    return parameter.dtype in FLOATS and parameter.device.type in ("cpu", "cuda")


def _beside(
    p: torch.Tensor, g: torch.Tensor, m: torch.Tensor, v: torch.Tensor, full: torch.Tensor | None
) -> torch.Tensor:
    """The gradient in the order in memory that a parameter has, whose state must have it too."""
    flat = m.dtype == torch.uint8
    if not is_dense(p) or any(t is not None and t.stride() != p.stride() for t in ([] if flat else [m, v]) + [full]):
        raise RuntimeError(
            f"AdamW: a parameter of shape {list(p.shape)} has gaps, or its state lies in another order than it does; "
            "give it memory of its own (contiguous)"
        )
    return g if g.stride() == p.stride() else torch.empty_like(p).copy_(g)


def _scalar(value: torch.Tensor | None, device: torch.device | None = None) -> torch.Tensor | None:
    """One float32, on the device."""
    if value is None:
        return None
    return value.to(device=device or value.device, dtype=torch.float32, non_blocking=True)
