"""`bastile bench`: how fast and how lean the operators are, beside the code they replace and other libraries."""
