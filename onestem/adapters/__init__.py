"""Other APIs as adapters onto chats: bodies become those of a chat, its answer becomes theirs.

A conversation has the same tokens through each of them, so that a cached prefix is one for all.
"""
