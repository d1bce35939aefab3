"""Rotary functions."""

from typing import Any

from bastile.models.known._form import Form


def _rotary(**variant: Any) -> dict[str, Any]:
    """arguments: what it is given, in this order, "freqs" a complex table; heads: their axis where it is not told;
    partial: whether the first elements of a head turn alone, or "last", the last."""
    usual = {"layout": "halves", "partial": False, "table": "whole", "casts": False, "is_backward": False}
    return {**usual, "arguments": "q k cos sin", "heads": 1, **variant}


FORMS: tuple[Form, ...] = (
    # ---- rotary functions: what pairs are (halves, or neighbours: interleaved), whether all of a head turns or its
    # ---- first elements do (partial), what the tables hold, whether the result gets the input's type (casts)
    Form("rotary", "x cos + rotate_half(x) sin", (), ("1a10a7e371ea",), _rotary()),
    Form(
        "rotary",
        "the same of the head's first elements",
        (),
        ("aeac68b5b6bb", "ecf24c4bd51e", "49646629cf91", "d1d2c5418127"),
        _rotary(partial=True),
    ),
    Form(
        "rotary",
        "(x cos + rotate_half(x) sin).to(x.dtype)",
        (),
        ("0fbc4d5b4e43", "1b2b1f044406", "434dc4b80705"),
        _rotary(casts=True),
    ),
    Form(
        "rotary",
        "halves a, b: a cos - b sin, b cos + a sin, of tables for half a head",
        (),
        ("dd1efc02b483", "48cd24c660ed"),
        _rotary(table="half"),
    ),
    Form("rotary", "neighbours", (), ("2eebd2cf32a8",), _rotary(layout="interleaved")),
    Form(
        "rotary",
        "neighbours of the head's first elements",
        (),
        ("21b2bc52edb4",),
        _rotary(layout="interleaved", partial=True),
    ),
    Form(
        "rotary",
        "neighbours, in the input's type",
        (),
        ("d08892ab3145", "1283e0ce1f6a"),
        _rotary(layout="interleaved", casts=True),
    ),
    Form(
        "rotary",
        "neighbours, each element of the tables' first half twice",
        (),
        ("b4c24cb4b8d5",),
        _rotary(layout="interleaved", table="first half, each twice"),
    ),
    Form(
        "rotary",
        "the same of the head's first elements",
        (),
        ("cf39a4d4d572",),
        _rotary(layout="interleaved", partial=True, table="first half, each twice"),
    ),
    Form(
        "rotary",
        "neighbours, each element of the tables' first half twice, in the input's type",
        (),
        ("598345d4c8f4",),
        _rotary(layout="interleaved", casts=True, table="first half, each twice"),
    ),
    Form(
        "rotary",
        "neighbours in, halves out, of the tables' first half",
        (),
        ("7584a7d61e01",),
        _rotary(layout="interleaved_to_halves", table="first half, each twice"),
    ),
    Form(
        "rotary",
        "neighbours in, halves out, of whole tables",
        (),
        ("6e6106f7c96e",),
        _rotary(layout="interleaved_to_halves"),
    ),
    Form("rotary", "of one tensor: x cos + rotate_half(x) sin", (), ("1906d80fd6ec",), _rotary(arguments="x cos sin")),
    Form(
        "rotary",
        "of one tensor: neighbours, of tables for half a head, with heads behind positions",
        (),
        ("e72c60944106",),
        _rotary(layout="interleaved", table="half", arguments="x sin cos", heads=2),
    ),
    Form(
        "rotary",
        "of one tensor: neighbours of the head's last elements, of tables for half of these, in the input's type",
        (),
        ("1a79c67e87bc",),
        _rotary(layout="interleaved", table="half", casts=True, partial="last", arguments="x cos sin"),
    ),
    Form(
        "rotary",
        "neighbours as complex numbers, in the input's type",
        (),
        ("622a2c7aaa83",),
        _rotary(layout="interleaved", table="half", casts=True, arguments="q k freqs"),
    ),
    Form(
        "rotary",
        "the same with heads behind positions",
        (),
        ("7a24db7a0fc1",),
        _rotary(layout="interleaved", table="half", casts=True, arguments="q k freqs", heads=2),
    ),
    Form(
        "rotary",
        "the other way round: x cos - rotate_half(x) sin",
        (),
        ("b5d05d020e10",),
        _rotary(is_backward=True),
    ),
    Form(
        "rotary",
        "(x cos + rotate_half(x) sin).to(x.dtype) of [positions, heads, dim]",
        (),
        ("4898c341a604",),
        _rotary(casts=True, heads=-2),
    ),
)
