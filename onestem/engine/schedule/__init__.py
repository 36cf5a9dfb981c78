"""Who is admitted, and which rows a step has. No torch."""
