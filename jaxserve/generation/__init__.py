"""From a prompt to pieces of text: what the server and `LLM` share above the engine."""
