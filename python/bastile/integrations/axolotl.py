"""Bastile as a plugin of Axolotl. In its YAML:

plugins:
  - bastile.integrations.axolotl.BastilePlugin
"""

from __future__ import annotations

from typing import Any

from axolotl.integrations.base import BasePlugin

import bastile

__all__ = ["BastilePlugin"]


class BastilePlugin(BasePlugin):
    """bastile.apply() before the model is loaded."""

    def pre_model_load(self, cfg: Any) -> None:
        bastile.apply()
