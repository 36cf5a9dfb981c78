"""The engine's process, and the server's end of the line to it."""
