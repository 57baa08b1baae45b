"""The lowest logit that top-k, top-p and min-p keep, found without a sort."""
