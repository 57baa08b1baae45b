"""Generation: from a prompt to pieces of text, shared by the server and `LLM`."""
