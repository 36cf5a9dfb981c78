"""The engine process, and the server's client for it."""
