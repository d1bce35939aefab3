"""The model families that Bastile knows, and what it puts into them."""

from bastile.models.table import FAMILIES, OPERATORS, Family

__all__ = ["FAMILIES", "OPERATORS", "Family"]
