"""Layers that are more than a weight: with an adapter of PEFT's LoRA, quantised by bitsandbytes or torchao, or both,
read as what the operators of ops/lora.py take. What a layer is, its class's code and its attributes say; one that may
do anything else is left to its own forward."""

from __future__ import annotations

import functools
import math
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from bastile.graphs import host_time
from bastile.guards import function_of, is_ours, mark_as_ours, stock_of
from bastile.models import adapted_experts
from bastile.models.forms import code_of
from bastile.models.known import KNOWN
from bastile.models.loading import is_torchs
from bastile.models.sites import ModelFile, Site
from bastile.ops._common import PLAIN, has_values
from bastile.ops._modules import has_hooks, plain_linear
from bastile.ops._narrow import is_narrowed
from bastile.ops._wide_adapters import are_wide
from bastile.ops.dequantize_4bit import Group, Nested, Quantised, dequantize_4bit
from bastile.ops.glu import glu_mlp
from bastile.ops.lora import Adapted, adapted_gated_mlp, adapted_linears, adapted_mlp
from bastile.ops.projections import projections
from bastile.recompute import is_of_last_layer
from bastile.report import Tally, noting


class NotServed(Exception):
    """Why a layer is left to its own forward."""


def adapted(module: nn.Module, x: torch.Tensor) -> Adapted:
    """What this layer computes of x.

    Raises:
        NotServed: where that is more than a product, an adapter and a bias; says why.
    """
    kind = type(module)
    if kind is not nn.Linear and _form(kind.forward) == "adapted linear":
        return _with_adapter(module, x)
    return _base(module, x)


def has_adapter(module: nn.Module) -> bool:
    """Whether this is a layer of PEFT's LoRA."""
    kind = type(module)
    return kind is not nn.Linear and hasattr(module, "lora_A") and _form(kind.forward) == "adapted linear"


def _form(forward: Any) -> str | None:
    """What kind of layer a forward, or what Bastile has put in its place, is of: by its code."""
    return _form_of(forward)


@functools.lru_cache(maxsize=64)
def _form_of(forward: Any) -> str | None:
    code = code_of(stock_of(forward))
    form = None if code is None else KNOWN.get(code.fingerprint)
    return None if form is None else form.kind


#: Of a weight as it is: torch's own, and Transformers' that are none of torch's class, of which one has it transposed.
_LINEAR = ("linear", "linear across")


def _base(module: Any, x: torch.Tensor) -> Adapted:
    """A layer without adapter."""
    kind = type(module)
    form = "linear" if kind is nn.Linear else _form(kind.forward)
    if form in _LINEAR:
        own = module._parameters
        weight: Any = own.get("weight")
        bias = own.get("bias")
        if "forward" in vars(module) or has_hooks(module):
            raise NotServed("a layer has hooks or a forward of its own")
        if kind is not nn.Linear and form == "linear" and bias is not None:
            raise NotServed("a layer adds a bias in a type of its own")
        if type(weight) in PLAIN:
            if is_narrowed(module) and not torch.is_autocast_enabled(x.device.type):
                return Adapted(None, bias, dequantise=weight.to, outputs=module.out_features)
            return Adapted(weight.t() if form == "linear across" else weight, bias)
        return Adapted(None, bias, dequantise=_of_torchao(weight), outputs=module.out_features)
    if form not in ("4-bit linear", "8-bit linear"):
        raise NotServed(f"{kind.__module__}.{kind.__qualname__} is no layer that Bastile knows")
    if "forward" in vars(module) or has_hooks(module):
        raise NotServed("a quantised layer has hooks or a forward of its own")
    bias = module._parameters.get("bias")
    if bias is not None and bias.dtype is not _dtype(x):
        raise NotServed("a quantised layer's bias is not of its input's type yet")
    make = _four_bits(module, x) if form == "4-bit linear" else _eight_bits(module)
    return Adapted(None, bias, dequantise=make, outputs=module.out_features)


def _of_torchao(weight: Any) -> Callable[[torch.dtype], torch.Tensor]:
    """torchao's int8 weights, made whole by its own function: PEFT puts adapters on no other type of its."""
    kind = type(weight)
    if kind.__name__ != "Int8Tensor" or not kind.__module__.startswith("torchao."):
        raise NotServed(
            f"a layer's weight is a {kind.__name__}: sharded, or quantised in a way that Bastile does not know"
        )
    if weight.act_quant_kwargs is not None or weight.act_pre_scale is not None:
        raise NotServed("a layer of torchao scales or rounds its input")
    return functools.partial(_by_torchao, weight)


def _by_torchao(weight: Any, dtype: torch.dtype) -> torch.Tensor:
    return weight.dequantize(dtype)


def _eight_bits(module: Any) -> Callable[[torch.dtype], torch.Tensor]:
    """bitsandbytes' int8: its weight as its own backward pass makes it. In its forward pass on CUDA it rounds the input
    to 8 bits too, which the product here does not."""
    weight, state = module._parameters["weight"], module.state
    rows, most = (state.CB, state.SCB) if weight.CB is None else (weight.CB, weight.SCB)
    if state.has_fp16_weights or rows is None or most is None:
        raise NotServed("a layer of bitsandbytes keeps its weight in 16 bits, or is not quantised yet")
    return functools.partial(_from_eight_bits, rows.detach(), most)


def _from_eight_bits(rows: torch.Tensor, most: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return rows.to(dtype, copy=True).mul_(most.unsqueeze(1).mul(1.0 / 127.0))


_PACKED_FOR_CPU = "packing_format_for_cpu"


class _FourBits:
    """What makes the weight of a layer of bitsandbytes: its tensors, read once."""

    __slots__ = ("_absmax", "_aligned", "_arguments", "_dtype", "_group", "_packed", "_pointer", "_state")

    def __init__(self, weight: torch.Tensor, state: Any) -> None:
        self._pointer, self._state, self._absmax, self._dtype = _address(weight), state, state.absmax, state.dtype
        with torch._C.DisableTorchFunctionSubclass():
            self._packed = weight.detach().as_subclass(torch.Tensor).view(torch.uint8)
        nested, inner = None, state.state2
        if inner is not None:
            nested = Nested(inner.code, inner.absmax, state.offset, inner.blocksize)
        self._arguments: Any = {"blocksize": state.blocksize, "nested": nested}
        self._group: Any = None  # with those that follow, of whom none has this one in its own
        floats = [state.code, state.absmax] if nested is None else [state.code, *nested[:3]]
        self._aligned = all([_address(t) % t.element_size() == 0 for t in floats])  # lists are taken as they lie

    def is_of(self, weight: torch.Tensor, state: Any) -> bool:
        """Whether the layer still has what was read: moving it gives it other tensors."""
        return state is self._state and state.absmax is self._absmax and _address(weight) == self._pointer

    def __call__(self, dtype: torch.dtype) -> torch.Tensor:
        """[N, K], the bits of bitsandbytes' dequantize_4bit: rounded to the weight's own type, and from there to this
        one. From float32 there is no second rounding to speak of."""
        state = self._state
        made = dequantize_4bit(
            self._packed, state.absmax, state.code, state.shape, self._made_in(dtype), **self._arguments
        )
        return made if made.dtype is dtype else made.to(dtype)

    @staticmethod
    def together(makes: list[Any], dtype: torch.dtype) -> Sequence[torch.Tensor] | None:
        """The weights of layers of one input in one launch. None where they are not all such layers, or so large that
        the launches saved are nothing beside the memory that they all take at once."""
        if not all([type(make) is _FourBits and make._aligned for make in makes]):
            return None
        first = makes[0]
        if first._group is None or first._group[0] != makes[1:]:
            first._group = makes[1:], Group([make._quantised() for make in makes])
        own = {make._dtype for make in makes}
        if len(own) > 1 or sum([math.prod(make._state.shape) for make in makes]) * dtype.itemsize > _MOST_TOGETHER:
            return None
        made = first._group[1](first._made_in(dtype))
        return made if made[0].dtype is dtype else [weight.to(dtype) for weight in made]

    def _made_in(self, dtype: torch.dtype) -> torch.dtype:
        return dtype if self._dtype is torch.float32 else self._dtype

    def _quantised(self) -> Quantised:
        state = self._state
        return Quantised(self._packed, state.absmax, state.code, state.shape, **self._arguments)


#: Bytes of the weights that are made at once: gate's and up's of an 8B model in 16 bits are 192 MiB, for which there is
#: room where they are needed. A launch is a hundredth of what products with larger ones take.
_MOST_TOGETHER = 256 << 20


def _address(t: torch.Tensor) -> int:
    return 0 if isinstance(t, FakeTensor) else t.data_ptr()


#: Of each layer what makes its weight. It holds no layer: bitsandbytes' weights know theirs.
_FOUR_BITS: weakref.WeakKeyDictionary[nn.Module, _FourBits] = weakref.WeakKeyDictionary()


def _four_bits(module: Any, x: torch.Tensor) -> Callable[[torch.dtype], torch.Tensor]:
    weight = module._parameters["weight"]
    state = getattr(weight, "quant_state", None)
    if state is None:
        raise NotServed("a layer of bitsandbytes is not quantised yet")
    if tuple(state.shape) != (module.out_features, module.in_features) or getattr(state, _PACKED_FOR_CPU, False):
        raise NotServed("a layer of bitsandbytes is packed for inference on CPU, or lies the other way round")
    if module.compute_dtype not in (None, _dtype(x)):
        raise NotServed(f"a layer of bitsandbytes computes in {module.compute_dtype}, its input's type is {_dtype(x)}")
    if torch.compiler.is_compiling():
        return functools.partial(_by_bitsandbytes, weight)
    known = _FOUR_BITS.get(module)
    if known is None or not known.is_of(weight, state):
        if not _is_usual(weight, state):
            return functools.partial(_by_bitsandbytes, weight)
        known = _FOUR_BITS[module] = _FourBits(weight, state)
    return known


def _is_usual(weight: torch.Tensor, state: Any) -> bool:
    """Whether these are tensors as our operator takes them, which is true of all that bitsandbytes makes today."""
    inner, float32 = state.state2, torch.float32
    single = [state.code, state.absmax] if inner is None else [state.code, inner.code, inner.absmax, state.offset]
    return (
        weight.is_contiguous()
        and all([type(t) in PLAIN and t.dtype is float32 for t in single])
        and (inner is None or (state.absmax.dtype is torch.uint8 and inner.dtype is float32))
    )


def _by_bitsandbytes(weight: Any, dtype: torch.dtype) -> torch.Tensor:
    """As its own product makes it."""
    made = sys.modules["bitsandbytes"].functional.dequantize_4bit(weight.data, weight.quant_state)
    return made.to(dtype)


def _dtype(x: torch.Tensor) -> torch.dtype:
    """The type in which a linear layer multiplies x."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def _with_adapter(module: Any, x: torch.Tensor) -> Adapted:
    own = vars(module).get("forward")  # ours where one model alone is patched
    if (own is not None and not is_ours(function_of(own))) or has_hooks(module):
        raise NotServed("a layer with an adapter has hooks or a forward of its own")
    inner = module._modules  # Module's own lookup is slow
    base = _base(inner["base_layer"], x)
    if module.disable_adapters:
        return _switched_off(module, base, x)
    if module.merged:
        return base
    found = _matrices(module, x)
    if found is None:
        return base
    name, a, b = found
    dropout = _dropout(inner["lora_dropout"]._modules[name])
    scale = float(module.scaling[name])
    return Adapted(base.weight, base.bias, a, b, scale, dropout, base.dequantise, base.outputs)


def _matrices(module: Any, x: torch.Tensor) -> tuple[str, torch.Tensor, torch.Tensor] | None:
    """The active adapter's name, A and B; None where there is none."""
    all_a, all_b = module._modules["lora_A"]._modules, module._modules["lora_B"]._modules
    active = [name for name in module.active_adapters if name in all_a]
    if not active:
        return None
    if len(active) > 1:
        raise NotServed("several adapters are active at once")
    (name,) = active
    if name in module.lora_variant:
        raise NotServed(f"the adapter is a {type(module.lora_variant[name]).__name__}")
    a, b = all_a[name], all_b[name]
    if not (plain_linear(a) and plain_linear(b)):
        raise NotServed("an adapter's matrices have biases, hooks or a forward of their own")
    of_a: Any = a._parameters["weight"]
    of_b: Any = b._parameters["weight"]
    if of_a.dtype is not x.dtype and not (torch.is_autocast_enabled(x.device.type) or are_wide(x, of_a)):
        raise NotServed(f"without autocast adapters of {of_a.dtype} compute in their own type")
    return name, of_a, of_b


def _switched_off(module: Any, base: Adapted, x: torch.Tensor) -> Adapted:
    """A layer whose adapters are disabled. With zeros in an adapter's place it is computed by the kernels that compute
    it with the adapter: so a policy that has not moved yet has the very log-probabilities of its reference, as without
    Bastile. By others each would be rounded in its own way, and preference losses are made of the difference."""
    if module.merged:
        raise NotServed("adapters are merged and disabled: they are taken out of the weight first")
    try:
        found = None if torch.compiler.is_compiling() else _matrices(module, x)
    except NotServed:  # PEFT computes it with the adapter, by the base layer and what is added to its result
        return base
    return base if found is None else base._replace(a=_zeros_like(found[1]), b=_zeros_like(found[2]))


#: By shape, type and device.
_ZEROS: dict[tuple[Any, ...], torch.Tensor] = {}


def _zeros_like(matrix: torch.Tensor) -> torch.Tensor:
    """Made once, but for tensors without values and within a graph that is captured, to whom memory belongs there."""
    if not has_values(matrix) or (matrix.is_cuda and torch.cuda.is_current_stream_capturing()):
        return matrix.new_zeros(matrix.shape)
    key = matrix.shape, matrix.dtype, matrix.device
    if key not in _ZEROS:
        with torch.inference_mode(False):  # they outlive the mode in which they are made
            _ZEROS[key] = matrix.new_zeros(matrix.shape)
    return _ZEROS[key]


def _dropout(layer: nn.Module) -> float:
    if has_hooks(layer) or "forward" in vars(layer):
        raise NotServed("an adapter's dropout has hooks or a forward of its own")
    if type(layer) is nn.Identity:
        return 0.0
    if type(layer) is not nn.Dropout or layer.p >= 1:
        raise NotServed(f"an adapter's dropout is a {type(layer).__name__}")
    return layer.p if layer.training else 0.0


def _result_dtype(module: Any, x: torch.Tensor) -> torch.dtype:
    """bitsandbytes's layers give results of their input's type."""
    base = getattr(module, "base_layer", module)
    if type(base) is nn.Linear:
        return _dtype(x)
    return _dtype(x) if _form(type(base).forward) in _LINEAR else x.dtype


def prepare_for_compiler(file: ModelFile) -> None:
    """For what asks for the form of a layer: else the compiler follows it into the reading of the source. Not as a
    decorator, which would import the compiler with `bastile.apply()`; the file of a model has imported it."""
    if not is_torchs(file.name):
        torch.compiler.assume_constant_result(_form)


def sites(file: ModelFile) -> Iterator[Site]:
    """PEFT's layers, each by itself; what serves several layers at once asks `linears` and `gated_mlp`."""
    prepare_for_compiler(file)
    for found in file.forwards("adapted linear"):
        yield file.forward_site("lora_linear", found.owner, linear_forward)
    yield from adapted_experts.sites(file)


def linear_forward(tally: Tally, original: Callable[..., Any]) -> Callable[..., Any]:
    """In place of the forward of PEFT's layers."""

    @functools.wraps(original)
    def forward(self: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs:
            tally.step_aside("a layer was not called with one tensor by position")
            return original(self, x, *args, **kwargs)
        try:
            layer = adapted(self, x)
        except NotServed as why:
            tally.step_aside(str(why))
            return original(self, x)
        tally.count()
        (y,) = adapted_linears(x, (layer,))
        return y.to(_result_dtype(self, x))

    return mark_as_ours(forward)


def _count(modules: Sequence[nn.Module]) -> None:
    """Counts the layers with adapters that a node serves, each as if it had been called by itself."""
    for module in () if torch.compiler.is_compiling() else modules:
        if "lora_A" in module._modules:
            kind: Any = type(module)
            _tally(kind).count()


@functools.lru_cache(maxsize=64)
def _tally(kind: Any) -> Tally:
    return Tally.of("lora_linear", f"{kind.__module__}.{kind.__qualname__}")


def linears(x: torch.Tensor, modules: tuple[nn.Module, ...]) -> Sequence[torch.Tensor]:
    """Each module's result; by one node where all of them are layers that it serves."""
    plain = [module for module in modules if plain_linear(module, with_bias=True)]
    if len(plain) == len(modules):
        biases = [module.bias for module in plain]
        has_some = any([bias is not None for bias in biases])
        return projections(x, *[module.weight for module in plain], biases=biases if has_some else ())
    try:
        layers = [adapted(module, x) for module in modules]
    except NotServed as why:
        _step_aside(modules, why)
        return [module(x) for module in modules]
    _count(modules)
    results = adapted_linears(x, layers)
    return [y.to(_result_dtype(m, x)) for m, y in zip(modules, results, strict=True)]


def projected(x: Any, *modules: nn.Module) -> Sequence[Any]:
    """As `linears`, of modules that may be anything."""
    has_adapters = any([hasattr(module, "lora_A") for module in modules])
    is_one = isinstance(x, torch.Tensor) and (has_adapters or share_a_node(x, modules))
    return linears(x, modules) if is_one else [module(x) for module in modules]


def share_a_node(x: Any, modules: tuple[nn.Module, ...]) -> bool:
    """Whether these are layers of a weight and perhaps a bias whose products of this input are to be one node. With a
    bias PyTorch's own layers take less of the host's time: so not where that counts."""
    if not isinstance(x, torch.Tensor) or not all([plain_linear(module, with_bias=True) for module in modules]):
        return False
    if not any([module._parameters["bias"] is not None for module in modules]):
        return True
    if torch.compiler.is_compiling() or not (x.requires_grad and torch.is_grad_enabled()):
        return False
    first: Any = modules[0]
    return not host_time.counts(first, x) or x.numel() * first.weight.shape[0] >= host_time.LEAST


def gated_mlp(x: torch.Tensor, gate: nn.Module, up: nn.Module, down: nn.Module, activation: str) -> torch.Tensor:
    """The gated MLP of these layers; by one node where it serves all of them."""
    if all([type(layer) is nn.Linear and layer._parameters.get("bias") is None for layer in (gate, up, down)]):
        return glu_mlp(x, gate, up, down, activation)  # which looks at the rest
    try:
        first, second, third = (adapted(module, x) for module in (gate, up, down))
    except NotServed as why:
        _step_aside((gate, up, down), why)
        return glu_mlp(x, gate, up, down, activation)
    _count((gate, up, down))
    y = adapted_gated_mlp(x, first, second, third, activation, remake=is_of_last_layer(down))
    return y.to(_result_dtype(down, x))


def mlp(x: torch.Tensor, up: nn.Module, down: nn.Module, activation: str) -> torch.Tensor:
    """The MLP of these layers without a gate, as one node.

    Raises:
        NotServed: where it serves one of them not; says why.
    """
    first, second = adapted(up, x), adapted(down, x)
    _count((up, down))
    y = adapted_mlp(x, first, second, activation, remake=is_of_last_layer(down))
    return y.to(_result_dtype(down, x))


def _step_aside(modules: Sequence[nn.Module], why: NotServed) -> None:
    """Told where adapters are among the layers; others are called as modules as a matter of course."""
    for module in () if torch.compiler.is_compiling() else modules:
        if hasattr(module, "lora_A"):
            kind: Any = type(module)
            _tally(kind).step_aside(f"layers of one input were called one by one: {why}")
            return


# ---- what of PEFT's is no adapted layer ------------------------------------------------------------------------------

#: Backbones that have run, for the report.
_ran: weakref.WeakSet[nn.Module] = weakref.WeakSet()
#: What PEFT's modules are of, and where.
_OF_PEFT = (("peft.tuners.tuners_utils", "BaseTunerLayer"), ("peft.utils.other", "AuxiliaryTrainingWrapper"))


def has_run(backbone: nn.Module) -> None:
    """Has the report look at this model's modules, if there is a PEFT that may have changed them."""
    if "peft" in sys.modules:
        _ran.add(backbone)


@noting
def note() -> str | None:
    """Which modules of PEFT's ran its own code, but for those of a known form: these are counted."""
    bases = tuple([getattr(sys.modules[name], cls) for name, cls in _OF_PEFT if hasattr(sys.modules.get(name), cls)])
    found: Counter[str] = Counter()
    for module in {each for backbone in list(_ran) for each in backbone.modules()} if bases else ():
        kind: Any = type(module)
        if issubclass(kind, bases) and _form(kind.forward) is None:
            found[f"{kind.__module__}.{kind.__qualname__}"] += 1
    if not found:
        return None
    names = ", ".join(f"{name} ({number})" for name, number in sorted(found.items()))
    return f"these modules of PEFT's are none that Bastile serves, and run its own code: {names}"
