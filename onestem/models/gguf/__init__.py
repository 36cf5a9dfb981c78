"""GGUF files as models: `header` reads their headers, `file` joins the parts of a model, `values`
turns blocks into numbers, and `architectures` says what fields and names mean. Where a decoder's
tensors lie in them is `onestem.models.gguf_tensors`.

The `gguf` package knows the types and how their blocks are decoded. Its own reader is not used: it
makes two arrays for each word of a vocabulary (minutes and gigabytes for a large one), and reads a
damaged length until memory ends.
"""
