"""A server that speaks OpenAI's protocol. Needs the extra `serve`."""
