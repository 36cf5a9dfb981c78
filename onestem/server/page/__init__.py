"""The page at /, and the reference at /docs."""
