"""Products of a mixture of experts: each row with the weights of its own expert."""
