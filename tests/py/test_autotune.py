"""Autotuning through Python: the switch, forgetting, and what products take; kernels are never measured."""

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
from bastile.ops.rms_norm import rms_norm
from oracle import EMULATED, assert_same_bits

needs_gpu = pytest.mark.skipif(EMULATED or not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(autouse=True)
def as_the_environment_says(monkeypatch: pytest.MonkeyPatch, tmp_path) -> Iterator[None]:
    """A cache of the test's own, and the mode as it was."""
    monkeypatch.setenv("BASTILE_CACHE", str(tmp_path / "cache"))
    yield
    monkeypatch.undo()
    bastile.set_autotune(None)


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
    kept = ["aa.choice", "c" * 32 + ".cubin", "choice"]  # the first and the last are no names of the library's
    for name in (*kept, "a" * 32 + ".choice", "b" * 32 + ".choice"):
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
def test_choices_are_measured_once(tmp_path):
    assert choices_on_disk(tmp_path) == []
    bastile.set_autotune(True)
    head(512)
    first = choices_on_disk(tmp_path)
    assert len(first) >= 3
    head(512)
    head(300)
    assert set(choices_on_disk(tmp_path)) >= set(first)
    before = len(choices_on_disk(tmp_path))
    assert bastile.clear_autotune_cache() == before
    assert choices_on_disk(tmp_path) == []
    assert bastile.clear_autotune_cache() == 0
    head(512)
    assert sorted(choices_on_disk(tmp_path)) == sorted(first)


@needs_gpu
def test_kernels_are_not_measured(tmp_path):
    x, weight = torch.randn(2048, 640, device="cuda"), torch.randn(640, device="cuda")
    want = rms_norm(x, weight)
    bastile.set_autotune(True)
    assert_same_bits(rms_norm(x, weight), want)
    assert choices_on_disk(tmp_path) == []


@needs_gpu
def test_matrix_products_are_measured_and_then_stay(tmp_path):
    bastile.clear_autotune_cache()  # what this process has remembered
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
    fused_linear_cross_entropy(y, output, target)
    assert len(choices_on_disk(tmp_path)) >= 1


@needs_gpu
def test_the_variable_switches_it_on_and_another_process_reads_the_choices(tmp_path):
    script = (
        f"import os, sys; sys.path.insert(0, {os.path.dirname(__file__)!r})\n"
        "import test_autotune\n"
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
    assert len(seen[0]) >= 3
    assert seen[0] == seen[1]
