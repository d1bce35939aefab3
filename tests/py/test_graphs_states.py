"""States of the process, switched between steps and between a step's two passes: noticed, or kinds of their own."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.module import register_module_forward_hook
from torch.overrides import BaseTorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import bastile
from bastile.graphs import stack as stacks
from conftest import tiny_model
from graphing import DEVICE, ON_CUDA, allow_graphs, assert_alike, batch_of, counted, loss_of, model_with_graphs

SETTINGS = "settings that change between the forward and the backward pass"


@pytest.fixture(autouse=True)
def graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    allow_graphs(monkeypatch)


def nothing(model: Any) -> None:
    pass


class _Sees(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


def _detect_anomaly() -> AbstractContextManager[Any]:
    with warnings.catch_warnings():  # it says that it is slow
        warnings.simplefilter("ignore")
        return torch.autograd.detect_anomaly()


@contextmanager
def _tf32() -> Iterator[None]:
    """As TrainingArguments(tf32=True) sets it; PyTorch's older getters then raise."""
    backends = torch.backends
    before = backends.fp32_precision
    backends.fp32_precision = "tf32"
    try:
        yield
    finally:
        backends.fp32_precision = before


@contextmanager
def _hooked() -> Iterator[None]:
    handle = register_module_forward_hook(lambda module, inputs, output: None)
    try:
        yield
    finally:
        handle.remove()


STATES: dict[str, tuple[Callable[[], AbstractContextManager[Any]], int, str | None]] = {
    "anomaly": (_detect_anomaly, 2, "anomaly mode, which looks at each operator's gradients"),
    "offloaded": (torch.autograd.graph.save_on_cpu, 2, "hooks on saved tensors"),
    "dispatch": (_Sees, 2, "a mode that sees each operator's calls"),
    "functions": (BaseTorchFunctionMode, 2, "a mode that sees each operator's calls"),
    "hooks": (_hooked, 2, "hooks on all modules"),
    "tf32": (_tf32, 2, SETTINGS),
    "autocast": (lambda: torch.autocast(DEVICE, torch.bfloat16), 4, None),
    "kernels": (lambda: sdpa_kernel(SDPBackend.MATH), 4, None),
}


@pytest.mark.parametrize("state", STATES)
def test_states_of_the_process(state: str) -> None:
    context, replayed, reason = STATES[state]
    now: list[Any] = []

    def around() -> AbstractContextManager[Any]:
        return context() if now else nullcontext()

    change = [lambda model: now.clear(), nothing, nothing, now.append]
    # A mask of rows that are not a multiple of 16 bytes loses its alignment on its way to the host's memory and back.
    batches = lambda model, step: batch_of(model, step, columns=16)  # noqa: E731
    got = assert_alike(tiny_model(), replayed, steps=6, before=change, around=around, batches=batches)
    assert reason is None or set(got.aside) == {reason}


def _alternately(first: Any, then: Any) -> dict[str, Any]:
    """From the fourth step on, the first context around the forward pass and the other one around the backward pass."""
    passes = {"around": (first, iter(range(100))), "around_backward": (then, iter(range(100)))}
    # Each of train's two runs has six steps.
    return {name: lambda c=c, n=n: c() if next(n) % 6 > 2 else nullcontext() for name, (c, n) in passes.items()}


def _autocast() -> AbstractContextManager[Any]:
    return torch.autocast(DEVICE, torch.bfloat16)


@contextmanager
def _deterministic() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def _math() -> AbstractContextManager[Any]:
    return sdpa_kernel(SDPBackend.MATH)


@pytest.mark.parametrize("context", [_tf32, _autocast, _math])
def test_states_of_whole_steps(context: Callable[[], AbstractContextManager[Any]]) -> None:
    """A kind of its own: noted in the fourth step, captured in the fifth, its backward pass as that of the fourth."""
    got = assert_alike(tiny_model(), 4, steps=6, **_alternately(context, context))
    assert not got.aside


@pytest.mark.parametrize("context", [_tf32, _deterministic])
def test_states_that_the_backward_pass_is_not_in(context: Callable[[], AbstractContextManager[Any]]) -> None:
    """Seen when the first step of that kind has its backward pass, so that none is captured."""
    got = assert_alike(tiny_model(), 2, steps=6, **_alternately(context, nullcontext))
    assert got.aside == {SETTINGS: 2}


def test_another_kernel_of_attention_in_the_second_run_of_checkpointed_layers() -> None:
    """What is not checkpointed takes its kernel from the forward pass."""
    model = tiny_model(attn_implementation="eager")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    got = assert_alike(model, 2, steps=6, **_alternately(_math, nullcontext))
    assert got.aside == {SETTINGS: 2}


@pytest.mark.parametrize("context", [_tf32, _autocast])
def test_a_backward_pass_that_becomes_another(context: Callable[[], AbstractContextManager[Any]]) -> None:
    """Of a kind that has been captured: the next steps see that, and its graphs are gone."""
    model = model_with_graphs(3)
    loss = loss_of(model)
    with context():
        loss.backward()
    assert counted() == (1, {})
    loss_of(model).backward()
    [(reason, times)] = counted()[1].items()
    assert (reason == SETTINGS, times) == (context is _tf32, 1)
    assert not next(iter(stacks._stacks.values())).captured


def test_someone_else_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole step, say: neither a capture within it nor the generator's state, which cannot be read then."""
    model = model_with_graphs()
    with monkeypatch.context() as patched:
        patched.setattr(torch.cuda, "is_initialized", lambda: True)
        patched.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        loss_of(model).backward()
    assert counted() == (0, {"a CUDA graph that someone else captures": 1})
    loss_of(model).backward()
    assert counted() == (1, {})


def test_a_step_that_was_noted_is_not_held() -> None:
    """Its loss, with all that hangs on it, goes when it is let go, without a search for circles."""
    bastile.apply(cuda_graphs=True)
    model = tiny_model().to(DEVICE)
    gc.disable()
    try:
        loss = loss_of(model)
        loss.backward(retain_graph=True)
        held = weakref.ref(loss.grad_fn)
        del loss
        assert held() is None
    finally:
        gc.enable()


@pytest.mark.skipif(not ON_CUDA, reason="needs streams")
def test_another_stream_has_graphs_of_its_own() -> None:
    side = torch.cuda.Stream()
    steps = iter(range(100))
    around = lambda: torch.cuda.stream(side) if next(steps) % 6 > 2 else nullcontext()  # noqa: E731
    assert_alike(tiny_model(), 4, steps=6, around=around)
