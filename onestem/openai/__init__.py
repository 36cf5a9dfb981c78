"""The words of OpenAI's API: which fields there are, how they are read, how answers are written.

Batch lines and the server's bodies are the same words, so both stand on this package.
"""
