"""OpenAI's API over HTTP: several applications, one engine in a process of its own."""
