"""What the operators on attention heads share: q and k are [B, heads, S, D], usually transposed views of
[B, S, heads, D]."""

from __future__ import annotations

from typing import Literal

import torch

from bastile.ops._common import need_floats

#: The widest head the kernels serve.
MOST_DIM = 2048

#: Where the members of a pair lie, by the C library's number of it.
Layout = Literal["halves", "interleaved", "interleaved_to_halves"]
LAYOUTS: tuple[Layout, ...] = ("halves", "interleaved", "interleaved_to_halves")


def layout_code(op: str, layout: Layout | None, interleaved: bool) -> int:
    """The number of a layout; `interleaved` names the second one in a word."""
    if layout is None:
        return int(interleaved)
    if layout not in LAYOUTS:
        raise ValueError(f"{op}: layout is {layout!r}; one of {', '.join(map(repr, LAYOUTS))} is needed")
    if interleaved and layout != "interleaved":
        raise ValueError(f"{op}: interleaved is True, but layout is {layout!r}; one of the two is enough")
    return LAYOUTS.index(layout)


def tokens_first(t: torch.Tensor) -> bool:
    """Whether the heads of a position lie together in memory, as in a transposed [B, S, heads, D]. The results then do
    too, so that what attention does with them (and autograd with the gradients) stays free of copies."""
    return t.stride(1) < t.stride(2)


def dense(t: torch.Tensor) -> torch.Tensor:
    """With a contiguous last dimension."""
    return t if t.stride(-1) == 1 else t.contiguous()


def check_heads(
    op: str, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, half_tables: bool
) -> None:
    """Raises for what `turn` would broadcast into something else. For the branch that runs it: kernels check."""
    need_floats(op, q=q, k=k, cos=cos, sin=sin)
    for name, t, dims, shape in (
        ("q", q, 4, "[B, heads, S, D]"),
        ("k", k, 4, "[B, kv_heads, S, D]"),
        ("cos", cos, 3, "[B or 1, S, R]"),
        ("sin", sin, 3, "[B or 1, S, R]"),
    ):
        if t.dim() != dims:
            raise ValueError(f"{op}: {name} has shape {list(t.shape)}; {shape} is needed")
    batch, _, positions, dim = q.shape
    rotary = cos.shape[2] * (2 if half_tables else 1)
    if k.shape[0] != batch or k.shape[2:] != q.shape[2:]:
        raise ValueError(
            f"{op}: k has shape {list(k.shape)}; [B, kv_heads, S, D], here [{batch}, kv_heads, {positions}, {dim}] as "
            "of q, is needed"
        )
    if cos.shape[0] not in (1, batch) or cos.shape[1] != positions or rotary > dim or rotary % 2:
        raise ValueError(
            f"{op}: cos has shape {list(cos.shape)}; [B or 1, S, {'R / 2' if half_tables else 'R'}], here [{batch} or "
            f"1, {positions}, {'a' if half_tables else 'an even'} number up to {dim // 2 if half_tables else dim}], is "
            "needed"
        )
    if sin.shape != cos.shape:
        raise ValueError(f"{op}: sin has shape {list(sin.shape)}; {list(cos.shape)}, that of cos, is needed")


def turn(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, layout: int, half_tables: bool, keep_type: bool
) -> torch.Tensor:
    """The rotation in plain torch, for devices and types without kernels."""
    near_in, near_out = LAYOUTS[layout] != "halves", LAYOUTS[layout] == "interleaved"
    if half_tables:
        cos, sin = ((t.repeat_interleave(2, -1) if near_out else torch.cat((t, t), -1)) for t in (cos, sin))
    rotary = cos.shape[-1]
    turning, rest = x[..., :rotary], x[..., rotary:]
    if near_in and not near_out:
        turning = torch.cat((turning[..., ::2], turning[..., 1::2]), dim=-1)
    turned = turning * cos.unsqueeze(1) + _partners(turning, near_out) * sin.unsqueeze(1)
    y = torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned
    return y.to(x.dtype) if keep_type else y


def _partners(x: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """(-x2, x1) in the places of (x1, x2)."""
    if interleaved:
        return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)
