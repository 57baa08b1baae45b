"""Tools and thinking in a model's text: definitions, prompts, and the parsers of model families."""
