"""The attention of vision towers in few calls: the same losses and gradients as chunk by chunk, how many calls and
questions are left, and what stays as Transformers has it."""

import ast
import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.nn import functional as F
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import bastile
from bastile.models import chunked_attention, chunks, rewrite, rewrite_chunks, rotary, small, support
from bastile.models.forms import Source
from bastile.models.table import OPERATORS
from conftest import gradients, older_than

#: The tokens of pictures, among the 97 of small models.
IMAGE, START = 95, 94
#: What small towers need beside small numbers: windows of 4 x 4 patches, pictures of few pixels.
VISION: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"embed_dim": 32, "hidden_size": 32, "mlp_ratio": 2, "patch_size": 4, "num_heads": 4, "depth": 2},
    "qwen2_5_vl": {
        "out_hidden_size": 32,
        "patch_size": 4,
        "num_heads": 4,
        "depth": 2,
        "window_size": 16,
        "fullatt_block_indexes": [1],
    },
    "qwen3_vl": {
        "out_hidden_size": 32,
        "patch_size": 4,
        "num_heads": 4,
        "depth": 2,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0],
    },
    "glm4v": {"out_hidden_size": 32, "patch_size": 4, "num_heads": 4, "depth": 2, "image_size": 16},
    "paddleocr_vl": {"patch_size": 4, "image_size": 16},
}
#: Time, height and width in patches. Of one size; of several; of a film; with windows at edges, of 16, 8 and 4 patches.
SIZES: dict[str, list[tuple[int, int, int]]] = {
    "alike": [(1, 8, 8)] * 3,
    "mixed": [(1, 4, 8), (1, 8, 8), (1, 4, 8), (1, 6, 4)],
    "edges": [(1, 6, 10), (1, 10, 6)],
}
#: GLM-4V's text has no token for padding in Transformers 5.0, and cannot be built.
TYPES = [kind for kind in VISION if not (kind == "glm4v" and older_than("5.1"))]


def model_of(kind: str, attention: str = "sdpa", **more: Any) -> Any:
    vision = {**small.small_config(kind).vision_config.to_dict(), **VISION[kind], **more}
    # As the first layer of text is one of pictures, in which Qwen3-VL adds to them.
    model: Any = small.small_model(kind, vision_config=vision, image_token_id=IMAGE, vision_start_token_id=START)
    model.set_attn_implementation(attention)
    return model


def batch_of(kind: str, model: Any, sizes: list[tuple[int, int, int]]) -> dict[str, torch.Tensor]:
    """One row of text with these pictures in it."""
    generator = torch.Generator().manual_seed(1)
    vision, grid = model.config.vision_config, torch.tensor(sizes)
    merge = vision.spatial_merge_size**2
    many = grid.prod(1)
    ids: list[int] = [5, 6]
    for count in (many // merge).tolist():
        ids += [START, *[IMAGE] * count, 7, 8]
    tokens = torch.tensor([ids])
    labels = tokens.where((tokens != IMAGE) & (tokens != START), -100)
    channels = getattr(vision, "in_channels", None) or vision.num_channels
    shape = (int(many.sum()), channels * getattr(vision, "temporal_patch_size", 1) * vision.patch_size**2)
    pixels = torch.randn(shape, generator=generator)
    if kind == "paddleocr_vl":
        pixels = pixels.view(-1, channels, vision.patch_size, vision.patch_size)
    return {
        "input_ids": tokens,
        "labels": labels,
        "pixel_values": pixels,
        "image_grid_thw": grid,
        "mm_token_type_ids": (tokens == IMAGE).long(),
    }


def step(model: Any, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = model(**batch).loss
    loss.backward()
    return loss.detach(), gradients(model)


def only(**more: bool) -> dict[str, Any]:
    """This operator alone."""
    return {**dict.fromkeys(OPERATORS, False), "chunked_attention": True, **more}


def of_a_model(**more: bool) -> dict[str, Any]:
    return {name: value for name, value in only(**more).items() if OPERATORS[name].of_a_model}


class Counts:
    def __init__(self) -> None:
        self.sdpa = self.asked = 0


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counts]:
    """Calls of PyTorch's attention, and of `tolist` by attentions or by what takes the place of theirs."""
    found, sdpa, tolist = Counts(), F.scaled_dot_product_attention, torch.Tensor.tolist

    def attend(*args: Any, **kwargs: Any) -> torch.Tensor:
        found.sdpa += 1
        return sdpa(*args, **kwargs)

    def asked(self: torch.Tensor) -> Any:
        frame = sys._getframe(1)
        while frame.f_code.co_name == "<listcomp>" and frame.f_back is not None:
            frame = frame.f_back
        owner = type(frame.f_locals.get("self")).__name__
        found.asked += owner.endswith("Attention") or frame.f_globals.get("__name__") in (
            chunks.__name__,
            chunked_attention.__name__,
        )
        return tolist(self)

    with monkeypatch.context() as patch:
        patch.setattr(F, "scaled_dot_product_attention", attend)
        patch.setattr(torch.Tensor, "tolist", asked)
        yield found


def assert_near(got: Any, want: Any, allowed: float = 2e-6) -> None:
    """The losses, and each gradient by the largest element of all of them: two orders of float32 sums."""
    assert float((got[0] - want[0]).abs() / want[0].abs()) <= allowed
    assert got[1].keys() == want[1].keys()
    largest = max(float(g.abs().max()) for g in want[1].values())
    worst = {name: float((got[1][name] - g).abs().max()) / largest for name, g in want[1].items()}
    assert max(worst.values()) <= allowed, max(worst.items(), key=lambda item: item[1])


# ---- models ---------------------------------------------------------------------------------------------------------

#: Calls of the towers' two layers, stock and ours: a layer of text makes one each too, of which there are two.
CALLS = {
    ("qwen2_5_vl", "alike"): (12 + 3, 1 + 1),
    ("qwen2_5_vl", "mixed"): (2 + 4 + 2 + 2 + 4, 2 + 3),  # 16s and one of 8; 32, 64, 32, 24 put side by side
    ("qwen2_5_vl", "edges"): (6 + 6 + 2, 3 + 1),  # 16, 16, 8, 8, 8, 4 and 16, 8, 16, 8, 8, 4
    ("qwen3_vl", "alike"): (6, 2),
    ("qwen3_vl", "mixed"): (8, 6),
    ("qwen3_vl", "edges"): (4, 2),
}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("kind", TYPES)
def test_a_step_is_the_same(kind: str, sizes: str, attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(kind, attention)
    batch = batch_of(kind, model, SIZES[sizes])
    with counted(monkeypatch) as stock:
        want = step(model, batch)
    assert bastile.apply_to_model(model, **of_a_model()) == [f"chunked_attention_{kind}"]
    bastile.report(reset=True)
    with counted(monkeypatch) as ours:
        got = step(model, batch)
    assert_near(got, want)
    told = [line for line in bastile.report() if line.operator == "chunked_attention"]
    assert [(line.ran, line.aside) for line in told] == [(2, {})]
    assert stock.asked == 3 * 2
    assert ours.asked == (2 if kind == "qwen2_5_vl" else 1)  # windows and pictures, each once
    before, after = CALLS.get((kind, sizes), CALLS["qwen3_vl", sizes])
    assert (stock.sdpa, ours.sdpa) == ((before + 2, after + 2) if attention == "sdpa" else (0, 0))
    bastile.reset(model=model)
    with counted(monkeypatch) as again:
        assert torch.equal(step(model, batch)[0], want[0])
    assert again.asked == 6


def test_for_the_whole_process_and_beside_every_other_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("paddleocr_vl")
    batch = batch_of("paddleocr_vl", model, SIZES["edges"])
    want = step(model, batch)
    names = bastile.apply(model_types="paddleocr_vl")
    assert {"rope_paddleocr_vl", "chunked_attention_paddleocr_vl"} <= {*names}
    with counted(monkeypatch) as ours:
        assert_near(step(model, batch), want, 2e-5)
    assert ours.asked == 1
    assert bastile.reset(["chunked_attention_paddleocr_vl"]) == ["chunked_attention_paddleocr_vl"]
    with counted(monkeypatch) as stock:
        assert_near(step(model, batch), want, 2e-5)
    assert stock.asked == 6


@pytest.mark.parametrize("way", ["a model", "all"])
def test_what_another_operator_rewrites_of_the_same_function_stays(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `rope` queries, keys and values of one input are one node: in the function with one call of the attention
    too, while it is in force and no longer."""
    model = model_of("paddleocr_vl")
    batch = batch_of("paddleocr_vl", model, SIZES["alike"])
    want = step(model, batch)
    nodes: list[Any] = []
    stock_projected = rotary.projected
    monkeypatch.setattr(rotary, "projected", lambda *args: nodes.append(args) or stock_projected(*args))

    def ran() -> tuple[int, int]:
        nodes.clear()
        bastile.report(reset=True)
        assert_near(step(model, batch), want, 2e-5)
        towers = [each for each in nodes if "PaddleOCRVision" in type(each[1]).__name__ or len(each) == 4]
        return len(towers), bastile.report().ran("chunked_attention")

    def put_in(**chosen: bool) -> None:
        if way == "all":
            bastile.apply(**only(**chosen), model_types="paddleocr_vl")
        else:
            bastile.apply_to_model(model, **of_a_model(**chosen))

    put_in(rope=True)
    with_both = ran()
    assert with_both[0] >= 2
    assert with_both[1] == 2
    put_in(rope=True, chunked_attention=False)
    assert ran() == (with_both[0], 0)
    put_in()
    assert ran() == (0, 2)
    put_in(rope=True)
    assert ran() == with_both
    bastile.reset(["rope_paddleocr_vl"])
    assert ran() == (0, 2)
    put_in(rope=True)
    bastile.reset(["chunked_attention_paddleocr_vl"])
    assert ran() == (with_both[0], 0)


def test_16_bits_are_as_close_to_float64_as_stock_s() -> None:
    kind = "qwen2_5_vl"
    model = model_of(kind).bfloat16()
    exact = model_of(kind)
    exact.load_state_dict(model.state_dict())
    exact = exact.double()
    errors: dict[bool, float] = {False: 0.0, True: 0.0}
    for sizes in SIZES.values():
        batch = batch_of(kind, model, sizes)
        rounded = {**batch, "pixel_values": batch["pixel_values"].bfloat16()}
        want = step(exact, {**rounded, "pixel_values": rounded["pixel_values"].double()})[1]
        largest = max(float(g.norm()) for g in want.values())
        for is_ours in errors:
            if is_ours:
                bastile.apply_to_model(model, **of_a_model())
            found = step(model, rounded)[1]
            bastile.reset(model=model)
            errors[is_ours] += sum(float((found[n].double() - g).norm() / largest) ** 2 for n, g in want.items())
    assert errors[True] <= 1.05 * errors[False]


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_tower_does_not_ask_again(reentrant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = "qwen2_5_vl"
    model = model_of(kind)
    batch = batch_of(kind, model, SIZES["edges"])
    want = step(model, batch)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    bastile.apply_to_model(model, **of_a_model())
    bastile.report(reset=True)
    with counted(monkeypatch) as ours:
        got = step(model, batch)
    assert got[1].keys() <= want[1].keys()
    assert_near((got[0], {n: got[1].get(n, w * 0) for n, w in want[1].items()}) if reentrant else got, want)
    assert bastile.report().ran("chunked_attention") >= 3
    assert ours.asked == 2


def test_an_attention_of_a_users_own_is_called_chunk_by_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[torch.Size] = []

    def attend(module: Any, q: Any, k: Any, v: Any, attention_mask: Any, **given: Any) -> Any:
        calls.append(q.shape)
        return sdpa_attention_forward(module, q, k, v, attention_mask, **given)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "of_a_user", attend)
    model = model_of("qwen3_vl")
    model.model.visual.set_attn_implementation("of_a_user")
    batch = batch_of("qwen3_vl", model, SIZES["alike"])
    want = step(model, batch)
    shapes = [*calls]
    assert len(shapes) == 6
    calls.clear()
    bastile.apply_to_model(model, **of_a_model())
    bastile.report(reset=True)
    with counted(monkeypatch) as ours:
        got = step(model, batch)
    assert calls == shapes
    assert torch.equal(got[0], want[0])
    assert ours.asked == 1
    told = [line.aside for line in bastile.report() if line.operator == "chunked_attention"]
    assert {"its attention is not Transformers' own sdpa or eager one"} == {*told[0]}


@pytest.mark.parametrize("is_everywhere", [False, True])
def test_a_function_in_the_place_of_sdpa_is_a_users_own(is_everywhere: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though it says that it is Transformers'."""

    @functools.wraps(sdpa_attention_forward)
    def attend(*args: Any, **kwargs: Any) -> Any:
        return sdpa_attention_forward(*args, **kwargs)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", attend)
    if is_everywhere:
        monkeypatch.setattr(transformers.integrations.sdpa_attention, "sdpa_attention_forward", attend)
    model = model_of("qwen3_vl")
    bastile.apply_to_model(model, **of_a_model())
    with counted(monkeypatch) as ours:
        step(model, batch_of("qwen3_vl", model, SIZES["alike"]))
    assert ours.sdpa == 6 + 2


def test_dropout_is_drawn_chunk_by_chunk() -> None:
    model = model_of("paddleocr_vl", "eager", attention_dropout=0.5)
    batch = batch_of("paddleocr_vl", model, SIZES["alike"])
    found = []
    bastile.report(reset=True)
    for is_ours in (False, True):
        if is_ours:
            bastile.apply_to_model(model, **of_a_model())
        torch.manual_seed(0)
        found.append(step(model, batch)[0])
    assert torch.equal(*found)
    told = [line for line in bastile.report(reset=True) if line.operator == "chunked_attention"]
    assert [line.ran for line in told] == [0]
    model.eval()(**batch)
    assert bastile.report().ran("chunked_attention") == 2


def test_compiled_code_is_the_original(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("qwen3_vl")
    batch = batch_of("qwen3_vl", model, SIZES["alike"])
    want = step(model, batch)
    bastile.apply_to_model(model, **of_a_model())
    tower = model.model.visual
    compiled = torch.compile(tower.blocks[0], backend="eager")
    tower.blocks[0] = compiled
    ran: list[int] = []
    run = chunked_attention.Chunked._run
    monkeypatch.setattr(chunked_attention.Chunked, "_run", lambda *args: ran.append(1) or run(*args))
    got = step(model, batch)
    assert float((got[0] - want[0]).abs()) <= 1e-5
    assert ran == [1]  # in the other layer
    torch.compiler.reset()


def test_what_is_told_of_a_type() -> None:
    found = support.support("qwen3_vl")
    assert found.places["chunked_attention"] == ["Qwen3VLVisionAttention.forward"]
    assert "chunked_attention" not in found.stock
    assert "chunked_attention" not in {**support.support("bert").stock, **support.support("llama").places}
    with pytest.raises(RuntimeError, match="no place for bastile's chunked_attention in llama"):
        bastile.apply(chunked_attention=True, model_types="llama")


def test_every_tower_of_transformers_is_served() -> None:
    """Whatever follows from the statements that all of them have."""
    files = sorted(Path(transformers.__file__).parent.glob("models/*/modeling_*.py"))
    served, left = [], []
    for file in files:
        text = file.read_text()
        if "lengths.tolist(), dim=2)" not in text:
            continue
        source = Source(text)
        for name in source.classes:
            code = source.method(name, "forward")
            if code is not None and "lengths.tolist(), dim=2)" in ast.unparse(code.node):
                (left if rewrite_chunks.chunks(code) is None else served).append(name)
    assert len(served) >= 10
    assert left == []


# ---- what is found --------------------------------------------------------------------------------------------------

CUT = ["lengths = cu[1:] - cu[:-1]", "splits = [torch.split(t, lengths.tolist(), dim=2) for t in (q, k, v)]"]
ALL = "ys = [attend(self, a, b, c, mask=None, scale=self.scale, **kwargs)[0] for a, b, c in zip(*splits)]"
JOINED = "y = torch.cat(ys, dim=1)"
WITH = "(attend, self, q, k, v, cu, mask=None, scale=self.scale, **kwargs)"
LOOP = [
    "ys, ws = [], []",
    "for a, b, c in zip(*splits):",
    "    y, w = attend(self, a, b, c, mask=None, scale=self.scale, **kwargs)",
    "    ys.append(y)",
    "    ws.append(w)",
]
FOUND: dict[str, tuple[list[str], list[str] | None]] = {
    "outputs": ([*CUT, ALL, JOINED, "return y"], [f"y = bastile_chunked.output{WITH}", "return y"]),
    "in a branch": (
        ["if x:", *(f"    {line}" for line in (*CUT, ALL, JOINED)), "return y"],
        ["if x:", f"    y = bastile_chunked.output{WITH}", "return y"],
    ),
    "outputs in one statement": (
        [*CUT, ALL.replace("ys = ", "y = torch.cat(") + ", dim=1)", "return y"],
        [f"y = bastile_chunked.output{WITH}", "return y"],
    ),
    "weights too": (
        [*CUT, *LOOP, JOINED, "return (y, ws)"],
        [f"y, ws = bastile_chunked.with_weights{WITH}", "return (y, ws)"],
    ),
    "all outputs": (
        [
            *CUT,
            ALL.replace(")[0] for", ") for"),
            "y = torch.cat([each[0] for each in ys], dim=1)",
            "return y, ys[0][1]",
        ],
        [f"y, ys = bastile_chunked.with_outputs{WITH}", "return (y, ys[0][1])"],
    ),
    "outputs that somebody asks for": ([*CUT, ALL, JOINED, "return y, ys"], None),
    "lengths that somebody asks for": ([*CUT, ALL, JOINED, "return y, lengths"], None),
    "pieces that somebody asks for": ([*CUT, ALL, JOINED, "return y, splits"], None),
    "the last chunk's weights": ([*CUT, *LOOP, JOINED, "return y, w"], None),
    "the last chunk": ([*CUT, *LOOP, JOINED, "return y, a"], None),
    "another name in its loop": ([*CUT, *LOOP[:3], "    zs.append(y)", LOOP[4], JOINED, "return y"], None),
    "more in its loop": ([*CUT, *LOOP, "    self.count += 1", JOINED, "return y"], None),
    "another result": ([*CUT, ALL.replace("[0] for", "[1] for"), JOINED, "return y"], None),
    "another axis": ([CUT[0], CUT[1].replace("dim=2", "dim=1"), ALL, JOINED, "return y"], None),
    "joined along another": ([*CUT, ALL, "y = torch.cat(ys, dim=2)", "return y"], None),
    "other lengths": (["lengths = cu[1:] - cu[:-2]", CUT[1], ALL, JOINED, "return y"], None),
    "of two boundaries": (["lengths = cu[1:] - x[:-1]", CUT[1], ALL, JOINED, "return y"], None),
    "pieces in another order": ([*CUT, ALL.replace("self, a, b, c", "self, b, a, c"), JOINED, "return y"], None),
    "one piece twice": ([*CUT, ALL.replace("self, a, b, c", "self, a, b, b"), JOINED, "return y"], None),
    "told of its chunk": ([*CUT, ALL.replace("mask=None", "mask=a.mask"), JOINED, "return y"], None),
    "told what changes": ([*CUT, ALL.replace("mask=None", "mask=next(x)"), JOINED, "return y"], None),
    "some chunks": ([*CUT, ALL.replace("zip(*splits)]", "zip(*splits) if x]"), JOINED, "return y"], None),
    "something between": ([*CUT, "x = x + 1", ALL, JOINED, "return y"], None),
    "super": ([*CUT, ALL, JOINED, "return super().forward(y)"], None),
}


@pytest.mark.parametrize("case", FOUND)
def test_statements(case: str) -> None:
    given, want = FOUND[case]
    head = "class Attention(nn.Module):\n    def forward(self, x, q, k, v, cu, attend, **kwargs):\n"
    code = Source(head + "".join(f"        {line}\n" for line in given)).method("Attention", "forward")
    assert code is not None
    found = rewrite_chunks.chunks(code)
    lines = None if found is None else [line[4:] for line in ast.unparse(found).splitlines()[1:]]
    assert lines == want


def test_a_wrapper_is_not_what_it_wraps() -> None:
    """functools.wraps copies the mark of a rewritten function."""
    given, _ = FOUND["outputs"]
    code = Source("def f(self, x, q, k, v, cu, attend, **kwargs):\n" + "".join(f"    {x}\n" for x in given)).function(
        "f"
    )
    node = rewrite_chunks.chunks(code)
    assert isinstance(node, ast.FunctionDef)
    made = rewrite.rewritten(node, code, lambda self: None, {rewrite_chunks.CHUNKED: None})
    assert rewrite.rewriting_of(made).node is node  # type: ignore[union-attr]
    assert rewrite.rewriting_of(functools.wraps(made)(lambda: None)) is None
