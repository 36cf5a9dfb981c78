"""One step: which rows it has, what they read, what they give."""
