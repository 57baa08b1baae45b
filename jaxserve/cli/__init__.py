"""The command line: one module per command, with `add_arguments(parser)` and `main(args) -> exit status`."""
