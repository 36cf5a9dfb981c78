"""Decoders: one class described by a configuration, for all supported families.

`onestem.models.config` imports no torch.
"""
