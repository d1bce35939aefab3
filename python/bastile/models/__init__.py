"""The code of models that Bastile knows, and what it puts there."""
