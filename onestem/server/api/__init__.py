"""The routes of OpenAI's API over HTTP."""
