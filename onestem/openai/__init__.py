"""OpenAI's API: which fields there are, how they are read, how answers are written.

Batch lines and the server's bodies have the same fields, so both use this package.
"""
