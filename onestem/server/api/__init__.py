"""The words of OpenAI's API over HTTP."""
