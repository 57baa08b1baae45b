"""The lowest logit that top-k, top-p and min-p keep, without a sort."""
