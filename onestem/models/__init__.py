"""Decoders: one class described by a configuration, for all supported families.

`onestem.models.config` imports no torch; the rest is imported from its own module.
"""

from onestem.models.config import GenerationDefaults, ModelConfig, RopeScaling

__all__ = ["GenerationDefaults", "ModelConfig", "RopeScaling"]
