"""Autotuning through Python: the switch, forgetting, and results that stay the same, bit by bit, whatever is chosen."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

import bastile
from bastile._library import library
from bastile.ops.fused_linear_cross_entropy import fused_linear_cross_entropy
from bastile.ops.gated_mlp import gated_mlp
from bastile.ops.qk_norm_rope import qk_norm_rope
from bastile.ops.rms_norm import add_rms_norm, rms_norm
from bastile.ops.rope import rope
from bastile.ops.swiglu import swiglu
from oracle import EMULATED, assert_same_bits

needs_gpu = pytest.mark.skipif(EMULATED or not torch.cuda.is_available(), reason="needs a GPU")
needs_kernels = pytest.mark.skipif(not EMULATED and not torch.cuda.is_available(), reason="needs a GPU or the emulator")
DEVICE = "cuda" if torch.cuda.is_available() and not EMULATED else "cpu"

#: The highest number of an alternative that any launch offers.
MOST_ALTERNATIVES = 3


@pytest.fixture(autouse=True)
def as_the_environment_says(monkeypatch: pytest.MonkeyPatch, tmp_path) -> Iterator[None]:
    """A cache of the test's own, and the mode as it was."""
    monkeypatch.setenv("BASTILE_CACHE", str(tmp_path / "cache"))
    yield
    monkeypatch.undo()
    bastile.set_autotune(None)


def kernels(tokens: int) -> dict[str, torch.Tensor]:
    """What each operator with alternatives makes, forward and backward."""
    generator = torch.Generator().manual_seed(tokens)

    def tensor(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(DEVICE, torch.bfloat16).requires_grad_()

    x, residual, weight = tensor(tokens, 640), tensor(tokens, 640), tensor(640)
    a, b = tensor(tokens, 1304), tensor(tokens, 1304)
    q, k = (tensor(1, tokens, heads, 64).transpose(1, 2) for heads in (11, 3))
    q_weight, k_weight = tensor(64), tensor(64)
    cos, sin = tensor(1, tokens, 64).detach(), tensor(1, tokens, 64).detach()
    outputs = [rms_norm(x, weight), *add_rms_norm(x, residual, weight), swiglu(a, b), *rope(q, k, cos, sin)]
    outputs += qk_norm_rope(q, k, q_weight, k_weight, cos, sin)
    gate, up, down = tensor(1304, 640), tensor(1304, 640), tensor(640, 1304)
    outputs += [gated_mlp(x, gate, up, down)]  # its backward pass overwrites what it reads
    leaves = {"x": x, "residual": residual, "weight": weight, "a": a, "b": b, "q_weight": q_weight}
    leaves |= {"gate": gate, "up": up, "down": down}
    grads = torch.autograd.grad(sum(o.float().square().sum() for o in outputs), list(leaves.values()))
    made = {f"output {i}": o.detach() for i, o in enumerate(outputs)}
    return made | {f"gradient of {name}": g for name, g in zip(leaves, grads, strict=True)}


def same_bits(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert_same_bits(got[name], tensor)


# ---- the switch -----------------------------------------------------------------------------------------------------


def test_anything_but_yes_no_and_none_is_refused():
    for wrong in (2, -1, "1", []):
        with pytest.raises(ValueError, match=r"set_autotune: on is .*; True, False or None is needed"):
            bastile.set_autotune(wrong)
    for right in (True, False, None):
        bastile.set_autotune(right)
    assert library.bst_set_autotune(7) != 0
    assert b"on is 7" in library.bst_last_error()


def choices_on_disk(folder) -> list[str]:
    return [name for _, _, names in os.walk(folder) for name in names if name.endswith(".choice")]


def test_forgetting_deletes_choices_and_leaves_kernels(tmp_path):
    assert bastile.clear_autotune_cache() == 0
    cache = tmp_path / "cache"
    assert cache.is_dir()
    kept = ["aa.choice", "c" * 64 + ".cubin", "choice"]  # the first and the last are no names of the library's
    for name in (*kept, "a" * 64 + ".choice", "b" * 64 + ".choice"):
        (cache / name).write_bytes(b"x")
    assert bastile.clear_autotune_cache() == 2
    assert sorted(p.name for p in cache.iterdir()) == kept
    assert bastile.clear_autotune_cache() == 0


def test_on_a_cpu_there_is_nothing_to_choose(tmp_path):
    """Nothing is measured, stored or changed."""
    x, weight = torch.randn(5, 64), torch.randn(64)
    want = rms_norm(x, weight)
    bastile.set_autotune(True)
    assert_same_bits(rms_norm(x, weight), want)
    if not EMULATED:
        assert choices_on_disk(tmp_path) == []
        assert bastile.clear_autotune_cache() == 0


# ---- alternatives ---------------------------------------------------------------------------------------------------


@needs_kernels
@pytest.mark.parametrize("tokens", [37, 130])
def test_every_alternative_gives_the_same_bits(tokens: int, monkeypatch: pytest.MonkeyPatch):
    want = kernels(tokens)
    for number in range(1, MOST_ALTERNATIVES + 1):
        monkeypatch.setenv("BASTILE_ALTERNATIVE", str(number))
        bastile.set_autotune(None)
        same_bits(kernels(tokens), want)


# ---- measuring ------------------------------------------------------------------------------------------------------


def head(tokens: int, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    """The output head and its loss, three matrix products; in float64 by PyTorch, from the same rounded inputs."""
    generator = torch.Generator("cuda").manual_seed(tokens)
    shapes = (tokens, 512), (8000, 512)
    hidden, weight = (torch.randn(s, device="cuda", generator=generator).bfloat16().to(dtype) for s in shapes)
    leaves = hidden.requires_grad_(), weight.requires_grad_()
    target = torch.randint(8000, (tokens,), device="cuda", generator=generator)
    if dtype == torch.float64:
        loss = torch.nn.functional.cross_entropy(hidden @ weight.T, target)
    else:
        loss = fused_linear_cross_entropy(hidden, weight, target)
    return [loss.detach(), *torch.autograd.grad(loss, leaves)]


@needs_gpu
def test_choices_are_measured_once_and_change_no_bit(tmp_path):
    want = kernels(2048)
    assert choices_on_disk(tmp_path) == []
    bastile.set_autotune(True)
    same_bits(kernels(2048), want)
    first = choices_on_disk(tmp_path)
    assert len(first) >= 4  # rms_norm twice, rope, qk_norm_rope
    same_bits(kernels(2048), want)
    same_bits(kernels(1999), kernels(1999))
    assert set(choices_on_disk(tmp_path)) >= set(first)
    before = len(choices_on_disk(tmp_path))
    assert bastile.clear_autotune_cache() == before
    assert choices_on_disk(tmp_path) == []
    assert bastile.clear_autotune_cache() == 0
    same_bits(kernels(2048), want)
    assert sorted(choices_on_disk(tmp_path)) == sorted(first)


@needs_gpu
def test_a_length_of_the_same_magnitude_measures_nothing_new(tmp_path):
    bastile.set_autotune(True)
    kernels(2048)
    want = sorted(choices_on_disk(tmp_path))
    kernels(2049)
    assert sorted(choices_on_disk(tmp_path)) == want


@needs_gpu
def test_matrix_products_are_measured_and_then_stay(tmp_path):
    want = head(512)
    bastile.set_autotune(True)
    tuned = head(512)
    assert len(choices_on_disk(tmp_path)) >= 3
    for got, default, exact in zip(tuned[1:], want[1:], head(512, torch.float64)[1:], strict=True):
        # Rounding to bfloat16 decides; in which order float32 was summed before is not to be seen.
        assert (got - exact).norm() <= 1.01 * (default - exact).norm()
    for got, w in zip(head(512), tuned, strict=True):
        assert_same_bits(got, w)
    bastile.set_autotune(False)
    for got, w in zip(head(512), want, strict=True):
        assert_same_bits(got, w)


#: Of rows, a weight and an output head; so few rows that the loss does not wait for the number of those that count.
SHAPES = (1024, 1024), (1024,), (4096, 1024)


@needs_gpu
def test_under_capture_nothing_is_measured(tmp_path):
    x, weight, output = (torch.randn(*s, device="cuda", dtype=torch.bfloat16) for s in SHAPES)
    target = torch.randint(4096, (1024,), device="cuda")
    rms_norm(x, weight)  # compile first
    fused_linear_cross_entropy(x, output, target)
    torch.cuda.synchronize()
    bastile.set_autotune(True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = rms_norm(x, weight)
        loss = fused_linear_cross_entropy(y, output, target)
    assert choices_on_disk(tmp_path) == []
    graph.replay()
    bastile.set_autotune(False)
    assert_same_bits(y, rms_norm(x, weight))
    assert_same_bits(loss, fused_linear_cross_entropy(y, output, target))
    bastile.set_autotune(True)  # and none of it stands in the way of measuring later
    rms_norm(x, weight)
    assert len(choices_on_disk(tmp_path)) == 1


@needs_gpu
def test_the_variable_switches_it_on_and_another_process_reads_the_choices(tmp_path):
    script = (
        f"import os, sys; sys.path.insert(0, {os.path.dirname(__file__)!r})\n"
        "import test_autotune\n"
        "test_autotune.kernels(512)\n"
        "test_autotune.head(512)\n"
        # Not through Python's end: PyTorch's backward thread may still want its lock, which then aborts the process.
        "os._exit(0)\n"
    )
    seen = []
    for _ in range(2):
        environment = {**os.environ, "BASTILE_AUTOTUNE": "1", "PYTHONFAULTHANDLER": "1"}
        ran = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stderr
        folder = tmp_path / "cache"
        seen.append({name: (folder / name).stat().st_mtime_ns for name in choices_on_disk(tmp_path)})
    assert len(seen[0]) >= 9
    assert seen[0] == seen[1]
