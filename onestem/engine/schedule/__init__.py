"""Which requests are admitted, and which rows a step has. No torch."""
