"""A load generator for servers that speak OpenAI's API: open loop, seeded, checked streams."""
