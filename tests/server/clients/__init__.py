"""Clients that people use, each against a running server. Files of an environment of their own
(`clients.txt`): `tests/server/test_clients.py` starts pytest with its Python on this folder."""
